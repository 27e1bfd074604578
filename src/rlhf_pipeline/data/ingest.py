"""Stage program: one source as records on disk, read once however many stages use it.

python -m rlhf_pipeline.data.ingest job.json
"""

from __future__ import annotations

from rlhf_pipeline.config.data import SourceConfig
from rlhf_pipeline.data.record_files import RecordsWriter
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.data.row_counts import RowCounts
from rlhf_pipeline.data.sources.reading import read, source_origin
from rlhf_pipeline.data.sources.registry import adapter_module, find_source
from rlhf_pipeline.stages.job import Job, LaunchedJob
from rlhf_pipeline.stages.metrics import RowProgress
from rlhf_pipeline.stages.program import run_program


def source_job(config: SourceConfig, seed: int) -> Job:
    """The job that reads a source: what it depends on is the files' bytes or the hub's commit, and its adapter's code.

    Raises:
        ConfigError, DataError: see `source_origin`.
    """
    origin = source_origin(config)
    return Job(
        "source",
        {"source": config},
        origin.files,
        seed if find_source(config.name).generate is not None else 0,
        identities=origin.identities,
        modules=(adapter_module(config.name),),
    )


def main(job: LaunchedJob) -> dict[str, float]:
    """Write the source's records, and how many rows it has of each kind."""
    config = job.block("source", SourceConfig)
    counts = RowCounts()
    progress = RowProgress(job.metrics_file, config.samples)
    job.export.mkdir(exist_ok=True)
    with RecordsWriter(job.export) as writer:
        for row, (place, record) in enumerate(read(config, job.seed, job.digests.get("revision")), start=1):
            if isinstance(record, Unused):
                counts.add_unused(place, record)
            else:
                writer.add(place, record)
            progress.at(row)
            counts.rows = row
    counts.write(job.export)
    return {
        "source/rows": float(counts.rows),
        "source/bad_rows": float(counts.bad.total()),
        "source/passed_over_rows": float(counts.passed_over.total()),
    }


if __name__ == "__main__":
    run_program(main)
