"""The results of one complete run, for notebooks: never a mixture of several runs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.runtime.manifest import CURVES, Manifest, artifact_of
from rlhf_pipeline.runtime.metrics_file import read_json_lines
from rlhf_pipeline.stages.cache.workspace import work_directory


@dataclass(frozen=True)
class RunResults:
    """One evaluation, and the models that it compared."""

    folder: Path
    """The published evaluation."""
    evaluation: dict[str, Any]
    """Its `evaluation.json`, see `rlhf_pipeline.evaluation.report`."""
    models: dict[str, Path]
    """Folder of each model by the name of its stage: sft, reward_model, and ppo or dpo."""

    @classmethod
    def load(cls, root: Path, version: str | None = None) -> "RunResults":
        """Load a run of the folder `root`, such as data/: the given version or the newest one.

        Raises ArtifactError if no run is complete, or a result was removed.
        """
        found = sorted(
            path.parent
            for path in (root / "08_reporting").glob("*evaluation/*/*evaluation/evaluation.json")
            if version in (None, path.parents[1].name)
        )
        if not found:
            raise ArtifactError(
                f"{root}: found no complete run{f' {version}' if version else ''}. "
                "Fix: `kedro run --pipeline=full`, or the root of another environment, such as "
                "data/tiny"
            )
        folder = max(found, key=lambda path: path.parent.name)
        job = _work(folder, root / "07_workspace") / "job.json"
        inputs = json.loads(job.read_text())["inputs"].values()
        artifacts = (artifact_of(Path(path)) for path in inputs)
        made = {Manifest.read(path).stage: path for path in artifacts if path is not None}
        return cls(
            folder,
            json.loads((folder / "evaluation.json").read_text()),
            {stage: path for stage, path in made.items() if stage != "split"},
        )

    @property
    def candidate(self) -> str:
        """The policy that is compared with SFT: "ppo" or "dpo"."""
        return str(self.evaluation["candidate"])

    def metrics(self, stage: str) -> list[dict[str, Any]]:
        """The records of a stage's `metrics.jsonl`: {"step", "metrics", ...}, in order."""
        return read_json_lines(self.models[stage] / CURVES)


def _work(artifact: Path, workspace: Path) -> Path:
    """The work directory of the stage that made an artifact."""
    found = work_directory(artifact, workspace)
    if found is None:
        raise ArtifactError(
            f"{artifact}: its work directory was removed. Fix: run stage "
            f"{Manifest.read(artifact).stage} again"
        )
    return found
