"""Checks of what is elsewhere: the hub and other stores of data, MLflow."""

from pathlib import Path

from rlhf_pipeline.config.judges import ModelJudge
from rlhf_pipeline.data.sources.lookup import find_source
from rlhf_pipeline.data.sources.read_rows import source_origin
from rlhf_pipeline.diagnosis.finding import Finding, Setup
from rlhf_pipeline.errors import without_secrets
from rlhf_pipeline.stages.external_inputs import base_model_identity, judge_inputs
from rlhf_pipeline.tracking.store import check_store, tracking_uri


def base_model(setup: Setup) -> Finding:
    """A model on the hub exists there and may be read; a local one is checked before every run."""
    path = setup.base_model.path
    if path is None:
        return Finding("base model", "ok", "built from base_model.architecture")
    if Path(path).exists():
        return Finding("base model", "ok", f"local: {path}")
    (commit,) = base_model_identity(setup.base_model).values()
    return Finding("base model", "ok", f"{path} at {commit[:8]}")


def sources(setup: Setup) -> Finding:
    """Data sets on the hub and files in stores exist and may be read."""
    pretraining = setup.split.pretraining
    configured = [*setup.split.records(), *(pretraining.records() if pretraining else ())]
    remote = [
        source
        for source in configured
        if find_source(source.name).generate is None
        and (source.path is None or "://" in str(source.path))
    ]
    for source in remote:
        source_origin(source)
    found = ", ".join(source.label() for source in remote) or "none is remote"
    return Finding("sources", "ok", found)


def judges(setup: Setup) -> Finding:
    """Reward models on the hub that judge the evaluation exist there and may be read."""
    remote = [
        judge
        for judge in setup.evaluate.judges
        if isinstance(judge, ModelJudge) and judge.folder is None
    ]
    judge_inputs(remote)
    found = ", ".join(judge.model for judge in remote) or "none is remote"
    return Finding("judges", "ok", found)


def tracking_store(setup: Setup) -> Finding:
    """MLflow's store answers, and its tables fit the installed MLflow."""
    uri = tracking_uri(setup.project)
    shown = without_secrets(uri)
    database = Path(uri.removeprefix("sqlite:///"))
    if uri.startswith("sqlite:///") and not database.exists():
        return Finding("tracking store", "ok", f"{shown}, made by the first run")
    check_store(uri, setup.project)
    return Finding("tracking store", "ok", shown)


def store(setup: Setup) -> Finding:
    """The store for stages and checkpoints can be written to."""
    if setup.store is None:
        return Finding("store", "ok", "none is configured")
    setup.store.check()
    return Finding("store", "ok", setup.store.name)
