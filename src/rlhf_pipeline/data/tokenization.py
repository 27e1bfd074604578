"""Examples become token ids that fit the limits; what is too long is an error, left out or cut, as configured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.record_files import ExampleBatch
from rlhf_pipeline.data.template import render_prompts, render_responses, render_turns
from rlhf_pipeline.errors import ArtifactError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

A = TypeVar("A")
B = TypeVar("B")
Answer = Literal["chosen", "rejected"]


@dataclass(frozen=True)
class Rendered:
    """A batch of examples as the model will read it."""

    ids: list[str]
    prompts: list[str]
    chosen: list[str | None]
    rejected: list[str | None]
    turns: list[list[tuple[str, bool]] | None]
    """The prompt in pieces, True where the assistant speaks; where SFT learns earlier turns, too."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """One example as token ids, before the limits."""

    id: str
    prompt: list[int]
    """Generation prompt included."""
    chosen: list[int] | None
    """Ends in the only EOS it has."""
    rejected: list[int] | None
    turns: tuple[list[int], list[bool]] | None
    """The prompt once more, its assistant turns tokenized like responses, and which of its tokens are theirs; only where
    SFT learns earlier turns and there are some."""


@dataclass(frozen=True, slots=True)
class Limited:
    """A prompt or an answer within its limit."""

    ids: list[int]
    dropped: str | None = None
    """Why the row cannot be used."""
    cut: str | None = None
    """What was cut off."""


def render(
    batch: ExampleBatch, tokenizer: PreTrainedTokenizerBase, *, turns: Sequence[bool] | None = None
) -> Rendered:
    """Apply the chat template to the prompts and to every answer that the batch holds.

    `turns` marks the examples whose earlier assistant turns are wanted as pieces.

    Raises:
        ArtifactError: see `rlhf_pipeline.data.template`.
    """
    prompts = render_prompts(tokenizer, batch.ids, batch.prompts)

    def answers(column: list[str | None]) -> list[str | None]:
        rows = [row for row, answer in enumerate(column) if answer is not None]
        texts = render_responses(
            tokenizer,
            [batch.ids[row] for row in rows],
            [batch.prompts[row] for row in rows],
            [prompts[row] for row in rows],
            [answer for answer in column if answer is not None],
        )
        rendered: list[str | None] = [None] * len(column)
        for row, text in zip(rows, texts, strict=True):
            rendered[row] = text
        return rendered

    chosen = answers(batch.chosen)
    pieces: list[list[tuple[str, bool]] | None] = [None] * len(prompts)
    for row, wanted in enumerate(turns or ()):
        if (
            wanted and len(batch.prompts[row]) > 2
        ):  # shorter ones have no earlier turn of the assistant
            pieces[row] = render_turns(tokenizer, batch.ids[row], batch.prompts[row], prompts[row])
    return Rendered(batch.ids, prompts, chosen, answers(batch.rejected), pieces)


def tokenize(rendered: Rendered, tokenizer: PreTrainedTokenizerBase) -> list[Tokenized]:
    """Token ids of a rendered batch.

    Prompt and response are tokenized apart, so that no token crosses the boundary and a response's ids are what a model
    generates after the prompt's ids.

    Raises:
        ArtifactError: a response does not end in one EOS.
    """
    texts = [
        *rendered.prompts,
        *(text for text in (*rendered.chosen, *rendered.rejected) if text is not None),
    ]
    texts += [text for pieces in rendered.turns if pieces is not None for text, _ in pieces]
    ids = iter(encode(texts, tokenizer))
    prompts = [next(ids) for _ in rendered.prompts]
    chosen = [next(ids) if text is not None else None for text in rendered.chosen]
    rejected = [next(ids) if text is not None else None for text in rendered.rejected]
    pieces = [
        [(next(ids), own) for _, own in texts] if texts is not None else None
        for texts in rendered.turns
    ]
    for name, *answers, earlier in zip(rendered.ids, chosen, rejected, pieces, strict=True):
        for answer in [*answers, *(piece for piece, own in earlier or () if own)]:
            if answer is not None:
                _check_end(name, answer, tokenizer)
    turns = [_joined(row) if row is not None else None for row in pieces]
    return [
        Tokenized(*fields)
        for fields in zip(rendered.ids, prompts, chosen, rejected, turns, strict=True)
    ]


def encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of texts that hold their special tokens already; on all cores, without the offsets that nobody reads."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # a tokenizer's file may carry both from its training
    backend.no_padding()
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def one_ahead(items: Iterable[A], function: Callable[[A], B]) -> Iterator[tuple[A, B]]:
    """Each item with its result; `function` works on one item in a thread while the caller is busy with the one before.

    Worth it for a function that leaves the interpreter lock, as the tokenizers library does.
    """
    with ThreadPoolExecutor(1) as worker:
        pending = None
        for item in items:
            following = item, worker.submit(function, item)
            if pending is not None:
                yield pending[0], pending[1].result()
            pending = following
        if pending is not None:
            yield pending[0], pending[1].result()


# --- limits ---------------------------------------------------------------------------------------


def limited_prompt(name: str, ids: list[int], config: SplitConfig, bos_id: int | None) -> Limited:
    """A prompt of at most `config.max_prompt_tokens`; if it is to be cut, a leading BOS and the newest tokens stay.

    Raises:
        DataError: it is longer, and `config.over_long_prompts` is "error".
    """
    limit = config.max_prompt_tokens
    if len(ids) <= limit:
        return Limited(ids)
    if config.over_long_prompts == "truncate":
        return Limited(
            newest(ids, ids, limit, bos_id), cut=f"prompts cut to max_prompt_tokens={limit}"
        )
    return _refused(name, "prompt", ids, "max_prompt_tokens", "over_long_prompts", config)


def limited_answer(name: str, answer: Answer, ids: list[int], config: SplitConfig) -> Limited:
    """An answer of at most `config.max_response_tokens`; if it is to be cut, its beginning stays, without EOS.

    Raises:
        DataError: it is longer, and `config.over_long_responses` is "error".
    """
    limit = config.max_response_tokens
    if len(ids) <= limit:
        return Limited(ids)
    if config.over_long_responses == "truncate":
        return Limited(
            ids[:limit],
            cut=f"{answer} answers cut to max_response_tokens={limit}, which lost their EOS",
        )
    return _refused(
        name, f"{answer} answer", ids, "max_response_tokens", "over_long_responses", config
    )


def newest(ids: list[int], values: list[A], limit: int, bos_id: int | None) -> list[A]:
    """The values (one for each of `ids`) of a prompt's last `limit` tokens, of which a leading BOS is one."""
    if len(ids) <= limit:
        return values
    leading = 1 if ids[0] == bos_id and limit > 1 else 0
    return values[:leading] + values[len(values) - limit + leading :]


def _refused(
    name: str, what: str, ids: list[int], key: str, setting: str, config: SplitConfig
) -> Limited:
    limit = getattr(config, key)
    if getattr(config, setting) == "drop":
        return Limited(ids, dropped=f"{what} over {key}={limit}")
    raise DataError(
        f"{name}: the {what} has {len(ids)} tokens, more than split.{key}={limit}. Raise split.{key}, or set "
        f"split.{setting} to 'drop' to leave such rows out, or to 'truncate'."
    )


def _joined(pieces: list[tuple[list[int], bool]]) -> tuple[list[int], list[bool]]:
    return [one for ids, _ in pieces for one in ids], [own for ids, own in pieces for _ in ids]


def _check_end(name: str, response_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
    if (
        response_ids[-1] != tokenizer.eos_token_id
        or response_ids.count(tokenizer.eos_token_id) != 1
    ):
        raise ArtifactError(
            f"{name}: the response's ids must hold the EOS id {tokenizer.eos_token_id} ({tokenizer.eos_token!r}) once, "
            f"at their end, but end in {response_ids[-3:]}. Check that the tokenizer reads its EOS token as one token "
            "and that the text does not contain it."
        )
