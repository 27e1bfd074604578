"""Nodes that prepare the base model and the data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_pipeline.config.data import SourceConfig, SplitConfig
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.model import BaseModelConfig
from rlhf_pipeline.data.ingest import source_job
from rlhf_pipeline.data.row_counts import RowCounts
from rlhf_pipeline.stages.base_model_origin import model_origin
from rlhf_pipeline.stages.job import Job
from rlhf_pipeline.stages.run import run_stage


def base_model(
    config: BaseModelConfig, split_config: SplitConfig, launch: LaunchConfig, seed: int, workspace: Path
) -> Path:
    """Fetch the base model, or build a small one with a tokenizer trained on the sources' texts."""
    records = {}
    if config.path is None:
        records = _records("source", split_config.records(), split_config, launch, seed, workspace)
    return run_stage(Job("base_model", {"base_model": config}, records, seed, model_origin(config)), launch, workspace)


def split(base_model: Path, config: SplitConfig, launch: LaunchConfig, seed: int, workspace: Path) -> Path:
    """Divide the sources into disjoint, tokenized sets for the three phases, validation and test."""
    inputs = {"base_model": base_model, **_records("source", config.records(), config, launch, seed, workspace)}
    if config.pretraining is not None:
        inputs |= _records("pretraining", config.pretraining.records(), config, launch, seed, workspace)
    return run_stage(Job("split", {"split": config}, inputs, seed), launch, workspace)


def _records(
    kind: str, sources: Sequence[SourceConfig], config: SplitConfig, launch: LaunchConfig, seed: int, workspace: Path
) -> dict[str, Path]:
    """Read each source, or find it read; its records by input name. DataError where too many rows are bad."""
    jobs = {f"{kind}_{index}": source_job(source, seed) for index, source in enumerate(sources)}
    records = {name: run_stage(job, launch, workspace) for name, job in jobs.items()}
    for folder, source in zip(records.values(), sources, strict=True):
        RowCounts.read(folder).refuse_beyond(config.max_bad_fraction, source.label())
    return records
