"""Stage program: split the sources into disjoint, tokenized files for all phases.

python -m rlhf_pipeline.data.split job.json
"""

import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import combinations, compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rlhf_pipeline.config.evaluate import JUDGE_MODEL
from rlhf_pipeline.config.split import PHASES, Phase, SourceConfig, SplitConfig
from rlhf_pipeline.data.blend import Blend, blend
from rlhf_pipeline.data.phase_files import (
    FOR_REWARD,
    PARTS,
    Part,
    PhaseFile,
    RowMaker,
    parts,
    summary,
    tables,
)
from rlhf_pipeline.data.record_files import ArrowWriter, example_rows, examples, texts
from rlhf_pipeline.data.records import RowCounts
from rlhf_pipeline.data.split_report import headline
from rlhf_pipeline.data.token_contract import Reader, TokenContract, Tokenizer
from rlhf_pipeline.data.tokenization import (
    ANSWERS,
    ControlTokenFilter,
    Tokenized,
    encode,
    one_ahead,
    tokenize,
)
from rlhf_pipeline.errors import DataError, about
from rlhf_pipeline.runtime.imports import hidden
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.metrics_file import RowProgress
from rlhf_pipeline.runtime.program import run_program

_UNSERVABLE = "none of the phases that may use the source can use the record"
_DROPPED = "its prompt has no true answer (split.without_reference is drop)"
_BLOCKS = pa.schema([("input_ids", pa.list_(pa.int32()))])


def main(job: LaunchedJob) -> dict[str, float]:
    """Split the sources with the base model's tokenizer; add the token contract to each folder."""
    config = job.block("split", SplitConfig)
    folders = [job.inputs[name] for name in ("base_model", "reward_base") if name in job.inputs]
    readers = _readers(folders, trust_remote_code=job.trust_remote_code)
    contract, reward_contract = readers[0].contract, readers[-1].contract
    readers = readers[:1] if reward_contract == contract else readers
    # The driver lists the inputs `source_0`, `source_1`, ... in order.
    sources, pretraining = (
        [path for name, path in job.inputs.items() if name.startswith(f"{kind}_")]
        for kind in ("source", "pretraining")
    )
    report = split_sources(
        config,
        readers,
        job.seed,
        sources=sources,
        pretraining=pretraining,
        output=job.export,
        metrics_file=job.metrics_file,
    )
    text = json.dumps(report, indent=2, ensure_ascii=False)
    (job.export / "report.json").write_text(text + "\n", encoding="utf-8")
    for phase in filter(Path.is_dir, job.export.iterdir()):
        (reward_contract if phase.name in FOR_REWARD else contract).write(phase)
    return headline(report)


def _readers(folders: Sequence[Path], *, trust_remote_code: bool) -> list[Reader]:
    """Load tokenizers in a third of the time and memory: only code of a model may need torch."""
    unneeded = () if trust_remote_code else ("torch", "scipy", "sklearn", "boto3")
    logging.getLogger("transformers").disabled = True  # the package's own, not those of its modules
    with hidden(*unneeded):
        from transformers import AutoTokenizer  # imported late: the program shows its start at once

        load = partial(AutoTokenizer.from_pretrained, trust_remote_code=trust_remote_code)
        return [Reader(load(folder), TokenContract.read(folder)) for folder in folders]


def split_sources(
    config: SplitConfig,
    readers: Sequence[Reader],
    seed: int,
    *,
    sources: Sequence[Path],
    pretraining: Sequence[Path],
    output: Path,
    metrics_file: Path,
) -> dict[str, Any]:
    """Divide the records by conversation, tokenize them, write the files of `phase_files.tables`.

    The same arguments give the same bytes. Memory grows by a few dozen bytes per record, and by the
    first turns of the held-out ones. `sources` and `pretraining` are folders of records, in the
    order of the configuration. `readers` are that of the policy and, if the reward model has
    another tokenizer, that one, which reads the comparisons a second time. Returns the report, see
    `build_report`. Raises DataError if too many rows are bad, a text is too long, a file gets no
    row, or a prompt has two true answers; ArtifactError if a tokenizer or its chat template is
    unsuitable.
    """
    read = [examples(folder) for folder in sources]
    counts = [RowCounts.read(folder) for folder in sources]
    labels = _unique_labels(config.sources)
    control_tokens = ControlTokenFilter(readers, config.max_bad_fraction)
    usable = list(map(control_tokens.usable_rows, labels, counts, read))
    plan = blend(config, read, usable, seed)
    extra = any("extra" in table.column_names for table in read)
    files = {
        table.path: PhaseFile(table, output, *plan.rows(table), extra)
        for table in tables(config, has_own=len(readers) > 1)
    }
    _require_rows(files, config, config.unserved(plan.kinds()))
    progress = RowProgress(metrics_file, len(plan.parts) * len(readers))
    lengths: dict[str, Counter[int]] = {"prompt": Counter(), "response": Counter()}
    for number, reader in enumerate(readers):
        own = [
            file
            for file in files.values()
            if len(readers) == 1 or (file.table.folder in FOR_REWARD) == (number == 1)
        ]
        batches = _needed_batches(config, read, plan.references, own)
        maker = RowMaker(config, reader.tokenizer.bos_token_id)
        with about("reward_model.base_model") if number else nullcontext():
            # The next batch is tokenized meanwhile.
            for batch, tokenized in one_ahead(batches, partial(_Batch.tokenized, reader=reader)):
                source = config.sources[batch.source].name
                of_row = plan.parts[batch.numbers].tolist()
                rows = [
                    maker.make(source, example, tokens, PARTS[part])
                    for example, tokens, part in zip(batch.examples, tokenized, of_row, strict=True)
                ]
                for file in own:
                    file.add(rows, batch.numbers, config)
                for one in tokenized if number == 0 else ():
                    answers = one.chosen, one.rejected
                    lengths["prompt"][len(one.prompt)] += 1
                    lengths["response"].update(len(ids) for ids in answers if ids)
                progress.at(number * len(plan.parts) + int(batch.numbers[-1]) + 1)
            for file in own:
                file.close()
    report = build_report(config, labels, counts, plan, files, lengths)
    report["examples"] = first_examples(output, readers[0].tokenizer)
    if config.pretraining is not None:
        report["pretraining"] = pack(config, readers[0], pretraining, output)
    return report


class _Batch(NamedTuple):
    """Rows of one source that a file needs."""

    source: int
    numbers: np.ndarray
    """Positions of the rows in the blend."""
    examples: list[dict[str, Any]]
    """See `record_files.example_rows`; answers that no file needs are None."""
    turns: list[bool] | None
    """The rows whose earlier assistant turns SFT learns; None: none."""

    def tokenized(self, reader: Reader) -> list[Tokenized]:
        return tokenize(self.examples, reader, self.turns)


def _needed_batches(
    config: SplitConfig,
    tables: Sequence[pa.Table],
    references: pa.DictionaryArray,
    files: Sequence[PhaseFile],
) -> Iterator[_Batch]:
    needed = _wanted(files)
    read = {name: _wanted(one for one in files if name in one.table.answers) for name in ANSWERS}
    sft = [file for file in files if file.table.phase == "sft"]
    learns = _wanted(sft) if sft and config.sft_loss == "assistant" else None
    start = 0
    for source, table in enumerate(tables):
        for records in table.to_batches():
            numbers = start + np.flatnonzero(needed[start : start + len(records)])
            batch = example_rows(records.take(pa.array(numbers - start)))
            start += len(records)
            answers = references.take(pa.array(numbers)).to_pylist()
            for example, number, reference in zip(batch, numbers, answers, strict=True):
                unread = [name for name in ANSWERS if not read[name][number]]
                example |= dict.fromkeys(unread) | {"reference": reference}
            if batch:
                turns = None if learns is None else learns[numbers].tolist()
                yield _Batch(source, numbers, batch, turns)


def _wanted(files: Iterable[PhaseFile]) -> np.ndarray:
    """(N,) bool: the rows that belong to one of the files."""
    return np.logical_or.reduce([file.wanted for file in files])


def _unique_labels(sources: Sequence[SourceConfig]) -> list[str]:
    """The sources' names in the report; a repeated name gets a number."""
    labels = [source.label() for source in sources]
    earlier = [labels[:index].count(label) for index, label in enumerate(labels)]
    return [f"{label} #{n + 1}" if n else label for label, n in zip(labels, earlier, strict=True)]


def _require_rows(
    files: Mapping[str, PhaseFile], config: SplitConfig, unserved: Collection[Phase]
) -> None:
    """Raise DataError for files that have a share of the data and get no row of it."""
    shares = {"evaluation/test.arrow": config.test_fraction}
    shares[f"{JUDGE_MODEL}/train.arrow"] = config.held_back or 0.0
    for phase, weight in zip(PHASES, config.weights, strict=True):
        share = 0.0 if phase in unserved else weight
        shares[f"{phase}/train.arrow"] = share
        shares[f"{phase}/validation.arrow"] = share * config.validation_fraction
    found = {path for path, file in files.items() if file.wanted.any()}
    # Labelled answers without comparisons serve KTO alone.
    found |= {path.replace("kto", "reward_model") for path in found}
    empty = [path for path, share in shares.items() if share and path not in found]
    if empty and not all(source.is_test for source in config.sources):
        raise DataError(
            f"{', '.join(empty)}: found 0 rows, expected at least 1. Fix: add data, raise their "
            "share in split.weights, validation_fraction, test_fraction or "
            "evaluate.judge_model.held_back, or set it to 0"
        )


def pack(
    config: SplitConfig, reader: Reader, sources: Sequence[Path], output: Path
) -> dict[str, Any]:
    """Pack plain text for PPO's language-model loss (ptx; Ouyang et al. 2022, equation 2).

    Documents are joined, an EOS after each, and cut into blocks of equal length, which begin with
    BOS if the tokenizer puts one before text: such a model has never seen text without it.
    Documents with control tokens count as bad rows. Returns the part `pretraining` of the report,
    whose tokens are those without BOS. Raises DataError if the text does not fill one block, or too
    many rows are bad.
    """
    assert config.pretraining is not None
    block_tokens, (tokenizer, contract) = config.pretraining.block_tokens, reader
    labels = _unique_labels(config.pretraining.sources)
    counts = [RowCounts.read(folder) for folder in sources]
    control_tokens = ControlTokenFilter([reader], config.max_bad_fraction)

    def accepted() -> Iterator[list[str]]:
        for label, count, folder in zip(labels, counts, sources, strict=True):
            for places, batch in texts(folder):
                rows = zip(places, batch, strict=True)
                accepts = partial(control_tokens.accepts, label, count)
                yield [text for place, text in rows if accepts(place, [text])]

    first = tokenizer("")["input_ids"][:1]  # BOS if the tokenizer puts one before text, as Llama's
    bos = np.array(first if first == [tokenizer.bos_token_id] else [], np.int32)
    text_tokens = block_tokens - len(bos)
    documents, tokens, blocks, rest = 0, 0, 0, np.empty(0, np.int32)
    writer = ArrowWriter(output / "pretraining" / "train.arrow", _BLOCKS)
    for batch, ids in one_ahead(accepted(), lambda batch: encode(batch, tokenizer)):
        documents += len(batch)
        joined = [token for document in ids for token in (*document, contract.eos_id)]
        tokens += len(joined)
        rest = np.concatenate([rest, np.array(joined, np.int32)])
        if full := len(rest) // text_tokens:
            text, rest = np.split(rest, [full * text_tokens])
            rows = np.hstack([np.tile(bos, (full, 1)), text.reshape(full, text_tokens)])
            writer.write([{"input_ids": ids} for ids in rows])
            blocks += full
    writer.close()
    if not blocks:
        raise DataError(
            f"split.pretraining: found {tokens} tokens in {documents} texts, expected at least "
            f"block_tokens={block_tokens}. Fix: add text, or lower split.pretraining.block_tokens."
        )
    return {
        "sources": {
            label: {"rows": count.rows, "bad": count.bad, "skipped": count.skipped}
            for label, count in zip(labels, counts, strict=True)
        },
        "documents": documents,
        "tokens": tokens,
        "block_tokens": block_tokens,
        "blocks": blocks,
        "tokens_left_out": len(rest),
    }


def build_report(
    config: SplitConfig,
    labels: Sequence[str],
    counts: Sequence[RowCounts],
    plan: Blend,
    files: Mapping[str, PhaseFile],
    lengths: Mapping[str, Counter[int]],
) -> dict[str, Any]:
    """The report as JSON types, without `examples`, and with None as `pretraining`.

    `lengths` are those of "prompt" and "response" before the limits: length -> number of texts.
    Raises AssertionError if two parts share a conversation.
    """
    own = parts(config)
    return {
        "sources": _sources(config, labels, counts, plan),
        "distinct_prompts": {part: plan.distinct(plan.prompt_keys, part) for part in own},
        "conversations": {part: plan.distinct(plan.conversation_keys, part) for part in own},
        "serves": plan.kinds(),
        "unserved": config.unserved(plan.kinds()),
        "without_reference": _without_reference(labels, plan, files),
        "files": {path: file.describe() for path, file in files.items()},
        "overlap": _overlap(files, plan, own),
        "lengths": {
            name: {
                "limit": (limit := getattr(config, f"max_{name}_tokens")),
                "texts": found.total(),
                "longer": sum(n for length, n in found.items() if length > limit),
                **(summary(found) if found else {}),
            }
            for name, found in lengths.items()
        },
        "pretraining": None,
        "settings": config.model_dump(
            mode="json",
            include={
                "weights", "validation_fraction", "test_fraction", "near_duplicates",
                "without_reference", "over_long_prompts", "over_long_responses", "sft_loss",
            },
        ),
    }  # fmt: skip


def _sources(
    config: SplitConfig, labels: Sequence[str], counts: Sequence[RowCounts], plan: Blend
) -> dict[str, Any]:
    described, drops_near = {}, config.near_duplicates == "drop"
    has_answers = plan.references.null_count < len(plan.references)
    for index, (label, count) in enumerate(zip(labels, counts, strict=True)):
        of_row = plan.parts[plan.starts[index] : plan.starts[index + 1]]
        fates = {name: numbers[index] for name, numbers in plan.counts.items()}
        unused = Counter({_UNSERVABLE: fates["unservable"], _DROPPED: fates["dropped"]})
        described[label] = {
            "rows": count.rows,
            "bad": count.bad,
            "skipped": count.skipped + unused,
            "left_out_by_fraction": fates["left_out"],
            "duplicates_merged": fates["merged"],
            "repeats_of_held_out": fates["in_test"] + drops_near * fates["near"],
            "near_duplicates": fates["near"],
            "without_reference": fates["unanswered"] if has_answers else 0,
            "parts": {
                part: int((of_row == number).sum()) for number, part in enumerate(parts(config))
            },
        }
    return described


def _without_reference(
    labels: Sequence[str], plan: Blend, files: Mapping[str, PhaseFile]
) -> dict[str, dict[str, int]]:
    """Path -> source -> prompts without a true answer, of the files with true answers."""
    has_none = ~plan.references.is_valid().to_numpy(zero_copy_only=False)
    counted = {}
    for path, file in files.items():
        rows = np.concatenate(file.written)
        rows = rows[has_none[rows]]
        if "reference" in file.table.schema.names and len(rows):
            sources = np.searchsorted(plan.starts, rows, side="right") - 1
            counted[path] = dict(Counter(labels[source] for source in sources.tolist()))
    return counted


def _overlap(files: Mapping[str, PhaseFile], plan: Blend, parts: Sequence[Part]) -> dict[str, int]:
    """The numbers of conversations that each two parts share in the written files."""
    found = {}
    for part in parts:
        rows = [rows for file in files.values() if file.table.part == part for rows in file.written]
        found[part] = np.unique(plan.conversation_keys[np.concatenate(rows)].view("V16"))
    shared = {
        f"{one} and {other}": len(np.intersect1d(found[one], found[other], assume_unique=True))
        for one, other in combinations(parts, 2)
    }
    if any(shared.values()):
        raise AssertionError(f"parts share conversations: {shared}")
    return shared


def first_examples(folder: Path, tokenizer: Tokenizer) -> dict[str, dict[str, str]]:
    """The first training row of each phase as the model reads it: phase -> column -> text.

    Column `learned` has the tokens of the response that SFT learns.
    """
    examples = {}
    for phase in ("sft", "reward_model", "ppo"):
        with pa.ipc.open_stream(folder / phase / "train.arrow") as stream:
            rows = (row for batch in stream for row in batch.slice(0, 1).to_pylist())
            row: dict[str, Any] = next(rows, {})
        columns = {name.removesuffix("_ids"): row[name] for name in row if name.endswith("_ids")}
        if "loss_mask" in row:
            columns["learned"] = list(compress(row["response_ids"], row["loss_mask"]))
        examples[phase] = {
            name: str(tokenizer.decode(ids, skip_special_tokens=False))
            for name, ids in columns.items()
        }
    return examples


if __name__ == "__main__":
    run_program(main)
