"""Stage program: read one source once, for all stages that use it.

python -m rlhf_pipeline.data.source job.json
"""

from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.data.record_files import RecordsWriter
from rlhf_pipeline.data.records import RowCounts, Unused
from rlhf_pipeline.data.sources.registry import carried, read
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.metrics_file import RowProgress
from rlhf_pipeline.runtime.program import run_program


def main(job: LaunchedJob) -> dict[str, float]:
    """Write the records and row counts of the source."""
    config = job.block("source", SourceConfig)
    counts = RowCounts()
    progress = RowProgress(job.metrics_file, config.samples)
    job.export.mkdir(exist_ok=True)
    with RecordsWriter(job.export, has_extra=bool(carried(config))) as writer:
        rows = read(config, job.seed, job.digests.get("revision"))
        for counts.rows, (place, record) in enumerate(rows, start=1):
            if isinstance(record, Unused):
                counts.add_unused(place, record)
            else:
                writer.add(place, record)
            progress.at(counts.rows)
    counts.write(job.export)
    return {
        "source/rows": float(counts.rows),
        "source/bad_rows": float(counts.bad.total()),
        "source/skipped_rows": float(counts.skipped.total()),
    }


if __name__ == "__main__":
    run_program(main)
