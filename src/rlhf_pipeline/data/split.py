"""Stage program: the sources' records as disjoint, tokenized sets for the three phases, validation and test.

python -m rlhf_pipeline.data.split job.json
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_pipeline.config.split import PHASES, SourceConfig, SplitConfig
from rlhf_pipeline.data.blend import blend
from rlhf_pipeline.data.control_tokens import Screen
from rlhf_pipeline.data.parts import PARTS
from rlhf_pipeline.data.phase_files import PhaseFile, RowMaker
from rlhf_pipeline.data.pretraining import pack
from rlhf_pipeline.data.record_files import examples
from rlhf_pipeline.data.row_batches import needed_batches
from rlhf_pipeline.data.row_counts import RowCounts
from rlhf_pipeline.data.split_report import plot_lengths, render_markdown
from rlhf_pipeline.data.split_statistics import Lengths, headline, tally
from rlhf_pipeline.data.tables import TABLES
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.data.tokenization import one_ahead, render, tokenize
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.metrics_file import RowProgress
from rlhf_pipeline.runtime.program import run_program

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def main(job: LaunchedJob) -> dict[str, float]:
    """Prepare the data with the base model's tokenizer; each phase's folder carries the token contract."""
    from transformers import AutoTokenizer

    base_model = job.inputs["base_model"]
    config = job.block("split", SplitConfig)
    report = prepare(
        config,
        AutoTokenizer.from_pretrained(base_model, trust_remote_code=job.trust_remote_code),
        job.seed,
        sources=_inputs(job, "source"),
        pretraining=_inputs(job, "pretraining"),
        output=job.export,
        metrics_file=job.metrics_file,
    )
    (job.export / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (job.export / "report.md").write_text(render_markdown(report), encoding="utf-8")
    plot_lengths(report, job.export / "lengths.png")
    contract = TokenContract.read(base_model)
    for phase in (path for path in job.export.iterdir() if path.is_dir()):
        contract.write(phase)
    return headline(report)


def prepare(
    config: SplitConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    sources: Sequence[Path],
    pretraining: Sequence[Path],
    output: Path,
    metrics_file: Path,
) -> dict[str, Any]:
    """Divide the records by prompt, tokenize them, and write the files of `tables.TABLES`; return the report.

    The same arguments give the same bytes. `sources` and `pretraining` are folders of records, in the order of the
    configuration. The validation files of all three phases come from the same prompts. Memory does not grow with the
    records, but for a few dozen bytes each.

    Raises:
        DataError: too many rows are bad, a text is too long, or a part gets no prompt.
        ArtifactError: the tokenizer or its chat template is unfit.
    """
    tables = [examples(folder) for folder in sources]
    counts = [RowCounts.read(folder) for folder in sources]
    labels = _labels(config.sources)
    screen = Screen(tokenizer, labels, counts, config.max_bad_fraction)
    plan = blend(
        config, tables, [screen.sound(index, table) for index, table in enumerate(tables)], seed
    )
    chosen = {table.path: plan.rows(table) for table in TABLES}
    files = {table.path: PhaseFile.open(table, output, chosen[table.path][1]) for table in TABLES}
    maker = RowMaker(config, tokenizer.bos_token_id)
    progress = RowProgress(metrics_file, len(plan.parts))
    lengths = Lengths()
    batches = needed_batches(
        config, tables, plan, {path: rows for path, (rows, _) in chosen.items()}
    )
    rendered = ((batch, render(batch.examples, tokenizer, turns=batch.turns)) for batch in batches)
    for (batch, _), tokenized in one_ahead(rendered, lambda pair: tokenize(pair[1], tokenizer)):
        rows = [
            maker.make(config.sources[batch.source].name, messages, tokens, PARTS[part], reference)
            for messages, tokens, part, reference in zip(
                batch.examples.prompts,
                tokenized,
                plan.parts[batch.numbers].tolist(),
                batch.examples.reference,
                strict=True,
            )
        ]
        for path, mask in batch.chosen.items():
            files[path].add(
                [rows[index] for index in np.flatnonzero(mask)], batch.numbers[mask], config
            )
        lengths.add(tokenized)
        progress.at(int(batch.numbers[-1]) + 1)
    for file in files.values():
        file.close()
    _refuse_empty(files, config)

    report = tally(config, labels, counts, plan, files, lengths)
    if config.pretraining is not None:
        report["pretraining"] = _pretrain(config, tokenizer, pretraining, output)
    return report


def _labels(sources: Sequence[SourceConfig]) -> list[str]:
    """How the report calls each source; one that would be called like an earlier one gets a number."""
    labels, seen = [source.label() for source in sources], Counter[str]()
    for index, label in enumerate(labels):
        seen[label] += 1
        if seen[label] > 1:
            labels[index] = f"{label} #{seen[label]}"
    return labels


def _refuse_empty(files: dict[str, PhaseFile], config: SplitConfig) -> None:
    """DataError where a phase that has a weight could not train, or not be validated, for want of rows."""
    for phase, weight in zip(PHASES, config.weights, strict=True):
        for part, fraction in (("train", 1.0), ("validation", config.validation_fraction)):
            path = f"{phase}/{part}.arrow"
            if weight > 0 and fraction > 0 and not files[path].rows:
                raise DataError(
                    f"{path} gets no row. Add data that {phase} can use, raise split.validation_fraction, or set the "
                    "phase's weight in split.weights to 0."
                )


def _pretrain(
    config: SplitConfig, tokenizer: PreTrainedTokenizerBase, folders: Sequence[Path], output: Path
) -> dict[str, Any]:
    assert config.pretraining is not None
    counts = [RowCounts.read(folder) for folder in folders]
    labels = _labels(config.pretraining.sources)
    screen = Screen(tokenizer, labels, counts, config.max_bad_fraction)
    packed = pack(folders, tokenizer, config.pretraining.block_tokens, output, screen)
    described = {
        label: {"rows": count.rows, "bad": count.bad, "passed_over": count.passed_over}
        for label, count in zip(labels, counts, strict=True)
    }
    return {"sources": described} | packed


def _inputs(job: LaunchedJob, kind: str) -> list[Path]:
    """The inputs `kind_0`, `kind_1`, ... in order."""
    names = sorted(
        (name for name in job.inputs if name.startswith(f"{kind}_")),
        key=lambda name: int(name.rpartition("_")[2]),
    )
    return [job.inputs[name] for name in names]


if __name__ == "__main__":
    run_program(main)
