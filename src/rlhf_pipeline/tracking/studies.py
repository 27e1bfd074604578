"""The MLflow run of a study: the parent of the pipeline runs that it consists of."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_pipeline.tracking import store

STUDY_TAG = "rlhf.study"  # the digest of what the study compares
PARENT_TAG = "mlflow.parentRunId"


def log_study(
    project: Path, key: str, name: str, versions: Sequence[str], rates: Mapping[str, float],
    page: str, summary: str,
) -> None:  # fmt: skip
    """Log the rates and the page of a study, and make pipeline runs its children.

    `versions` are those of the pipeline runs. A repeated call for the same `key` completes the same
    MLflow run. Raises StageError if the store fails.
    """
    with store.registry(project, "the run of the study", uploads=True) as client:
        experiment = store.experiment_id(client)
        known = client.search_runs([experiment], f"tags.`{STUDY_TAG}` = '{key}'", max_results=1)
        tags = {STUDY_TAG: key}
        run = known[0] if known else client.create_run(experiment, run_name=name, tags=tags)
        parent = run.info.run_id
        for version in versions:
            made = client.search_runs([experiment], f"tags.`kedro.version` = '{version}'")
            for child in made:
                client.set_tag(child.info.run_id, PARENT_TAG, parent)
        for recipe, rate in rates.items():
            name = re.sub(r"[^\w./ -]", "_", recipe)  # MLflow refuses others
            client.log_metric(parent, f"rate/{name}", rate)
        client.log_text(parent, page, "study.html")
        client.set_tag(parent, "mlflow.note.content", summary)
        client.set_terminated(parent, "FINISHED")
