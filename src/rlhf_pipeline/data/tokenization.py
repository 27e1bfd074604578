"""Tokenize examples and apply the limits: over-long texts raise, are dropped, or are cut."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import pyarrow as pa

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.record_files import example_rows, examples
from rlhf_pipeline.data.records import RowCounts, Unused
from rlhf_pipeline.data.template import plain_text, render_prompts, render_responses, render_turns
from rlhf_pipeline.data.token_contract import Reader, Tokenizer, any_of, control_tokens
from rlhf_pipeline.errors import ArtifactError, DataError

A = TypeVar("A")
B = TypeVar("B")
Answer = Literal["chosen", "rejected"]
ANSWERS: tuple[Answer, ...] = get_args(Answer)


@dataclass(frozen=True, slots=True)
class Tokenized:
    """One example as token ids, before the limits."""

    id: str
    prompt: list[int]
    """Including the generation prompt."""
    chosen: list[int] | None
    """Contains exactly one EOS, at the end."""
    rejected: list[int] | None
    turns: tuple[list[int], list[bool]] | None
    """The prompt with its assistant turns tokenized like responses, and which tokens are theirs;
    None unless SFT learns earlier turns and the prompt contains some."""


@dataclass(frozen=True, slots=True)
class Limited:
    """A prompt or an answer after its limit was applied."""

    ids: list[int]
    dropped: str | None = None
    cut: str | None = None


def tokenize(
    examples: Sequence[Mapping[str, Any]], reader: Reader, turns: Sequence[bool] | None = None
) -> list[Tokenized]:
    """Apply the chat template to all prompts and answers, and tokenize the texts.

    Prompt and response are tokenized separately, so a response has the ids that a model generates
    after the prompt's. `examples` are those of `record_files.example_rows`; `turns` marks those
    whose prompts are divided into pieces by speaker. Raises ArtifactError like the functions of
    `template`, and if a response does not contain exactly one EOS, at its end.
    """
    names, dialogues = ([example[key] for example in examples] for key in ("id", "prompt"))
    prompts = render_prompts(reader.tokenizer, names, dialogues)
    given = ([example[answer] for example in examples] for answer in ANSWERS)
    chosen, rejected = (render_responses(reader, names, dialogues, prompts, said) for said in given)
    pieces: list[list[tuple[str, bool]]] = [[] for _ in prompts]
    for row, wanted in enumerate(turns or ()):
        # A prompt of at most two messages has no earlier turn of the assistant.
        if wanted and len(dialogues[row]) > 2:
            pieces[row] = render_turns(reader, names[row], dialogues[row], prompts[row])
    texts = [*prompts, *chosen, *rejected, *(text for row in pieces for text, _ in row)]
    distinct = list({text: None for text in texts if text is not None})
    found = encode(distinct, reader.tokenizer)
    ids: dict[str | None, list[int]] = dict(zip(distinct, found, strict=True))
    tokenized = []
    rows = names, prompts, chosen, rejected, pieces
    for name, prompt, preferred, other, spoken in zip(*rows, strict=True):
        for answer in (preferred, other, *(text for text, own in spoken if own)):
            if answer is not None:
                _check_end(name, ids[answer], reader)
        marked = [(token, own) for text, own in spoken for token in ids[text]]
        divided = [token for token, _ in marked], [own for _, own in marked]
        answers = ids.get(preferred), ids.get(other)
        tokenized.append(Tokenized(name, ids[prompt], *answers, divided if spoken else None))
    return tokenized


def corpus(sources: Sequence[Path]) -> Iterator[str]:
    """Yield every prompt and answer of the sources as plain dialogue text."""
    for source in sources:
        for example in chain.from_iterable(map(example_rows, examples(source).to_batches())):
            answers = [example[answer] for answer in ANSWERS if example[answer] is not None]
            first, *others = [[{"role": "assistant", "content": a}] for a in answers] or [[]]
            yield plain_text([*example["prompt"], *first])
            yield from map(plain_text, others)


def encode(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Tokenize texts that already contain their special tokens, on all cores."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # a tokenizer's file may contain both settings
    backend.no_padding()
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def one_ahead(items: Iterable[A], function: Callable[[A], B]) -> Iterator[tuple[A, B]]:
    """Yield each item with its result, which a thread computes one item ahead of the caller."""
    with ThreadPoolExecutor(1) as worker:
        submitted = ((item, worker.submit(function, item)) for item in items)
        pending = next(submitted, None)
        while pending is not None:
            item, result = pending
            pending = next(submitted, None)
            yield item, result.result()


def limited(
    name: str,
    text: Literal["prompt"] | Answer,
    ids: list[int],
    config: SplitConfig,
    bos_id: int | None = None,
) -> Limited:
    """Apply the limit: a cut prompt keeps BOS and the newest tokens, an answer its beginning.
    Raises DataError if the text is longer, and `over_long_*` is "error"."""
    kind, what = ("prompt", "prompt") if text == "prompt" else ("response", f"{text} answer")
    key, setting = f"max_{kind}_tokens", f"over_long_{kind}s"
    limit, action = getattr(config, key), getattr(config, setting)
    if len(ids) <= limit:
        return Limited(ids)
    if action == "drop":
        return Limited(ids, dropped=f"{what} over {key}={limit}")
    if action == "truncate":
        cut = f"{what}s cut to {key}={limit}"
        if text == "prompt":
            return Limited(newest_values(ids, ids, limit, bos_id), cut=cut)
        return Limited(ids[:limit], cut=f"{cut}, which lost their EOS")
    raise DataError(
        f"{name}: the {what} has {len(ids)} tokens, more than split.{key}={limit}. Fix: raise "
        f"split.{key}, or set split.{setting} to 'drop' or 'truncate'."
    )


def newest_values(ids: list[int], values: list[A], limit: int, bos_id: int | None) -> list[A]:
    """The values of a prompt's last `limit` ids; a leading BOS replaces the oldest of them."""
    if len(ids) <= limit:
        return values
    leading = 1 if ids[0] == bos_id and limit > 1 else 0
    return values[:leading] + values[len(values) - limit + leading :]


def _check_end(name: str, response_ids: list[int], reader: Reader) -> None:
    tokenizer, contract = reader
    *before, last = [token in contract.eos_ids for token in response_ids]
    if any(before) or not last:
        known = " or ".join(
            f"{number} ({tokenizer.convert_ids_to_tokens(number)!r})" for number in contract.eos_ids
        )
        raise ArtifactError(
            f"{name}: expected the EOS id {known} exactly once, at the end of the response; found "
            f"{response_ids[-3:]} at the end. Fix: check that the tokenizer encodes its EOS token "
            "as one token, and that the text does not contain it."
        )


def without(pattern: re.Pattern[str], text: str) -> str:
    """The text without what a pattern finds; what is left of two finds can be another one."""
    while pattern.search(text):
        text = pattern.sub("", text)
    return text


class ControlTokenFilter:
    """Rejects, as bad rows, records in which a control token would end or forge a turn."""

    def __init__(self, readers: Collection[Reader], max_bad_fraction: float) -> None:
        self._max_bad_fraction = max_bad_fraction
        tokens = frozenset[str]().union(*(control_tokens(*reader) for reader in readers))
        self._pattern = any_of(tokens)

    def usable_rows(self, label: str, counts: RowCounts, examples: pa.Table) -> np.ndarray:
        """The examples of a source without a control token, as (N,) bool; raises like `accepts`."""
        usable = []
        for example in chain.from_iterable(map(example_rows, examples.to_batches())):
            texts = [str(value) for message in example["prompt"] for value in message.values()]
            texts += [example[answer] for answer in ANSWERS if example[answer] is not None]
            usable.append(self.accepts(label, counts, example["id"], texts))
        return np.array(usable, bool)

    def accepts(self, label: str, counts: RowCounts, place: str, texts: Sequence[str]) -> bool:
        """Whether no text of a record has a control token; DataError if too many rows are bad."""
        found = next(filter(None, map(self._pattern.search, texts)), None)
        if found:
            reason = f"the text contains the tokenizer's control token {found.group()}"
            counts.add_unused(place, Unused(reason))
            counts.check_bad_fraction(self._max_bad_fraction, label)
        return found is None
