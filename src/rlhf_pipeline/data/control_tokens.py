"""Texts that would speak to the model in its own control tokens are kept out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.data.row_counts import RowCounts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Screen:
    """Refuses records that contain a control token, which would end a response or forge a turn, and counts them as bad."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        labels: Sequence[str],
        counts: Sequence[RowCounts],
        max_bad_fraction: float,
    ) -> None:
        self._labels, self._counts, self._max_bad_fraction = labels, counts, max_bad_fraction
        # The longest first: one token may begin with another.
        tokens = sorted(control_tokens(tokenizer), key=lambda token: (-len(token), token))
        self._pattern = re.compile("|".join(map(re.escape, tokens)))

    def sound(self, source: int, examples: pa.Table) -> np.ndarray:
        """Which examples of the source may be used, as (N,) bool; DataError as for `passes`."""
        return np.concatenate(
            [np.empty(0, bool), *(self._sound(source, batch) for batch in examples.to_batches())]
        )

    def _sound(self, source: int, batch: pa.RecordBatch) -> np.ndarray:
        contents = batch.column("prompt").flatten().field("content")
        row_of_content = np.repeat(np.arange(len(batch)), batch.column("prompt").value_lengths())
        suspect = np.union1d(
            row_of_content[self._found(contents)],
            np.flatnonzero(
                self._found(batch.column("chosen")) | self._found(batch.column("rejected"))
            ),
        )
        sound = np.ones(len(batch), bool)
        for row, example in zip(suspect, batch.take(pa.array(suspect)).to_pylist(), strict=True):
            texts = [
                *(message["content"] for message in example["prompt"]),
                example["chosen"],
                example["rejected"],
            ]
            sound[row] = self.passes(
                source, example["id"], [text for text in texts if text is not None]
            )
        return sound

    def _found(self, texts: pa.Array) -> np.ndarray:
        found = pc.match_substring_regex(texts, self._pattern.pattern)
        return found.fill_null(False).to_numpy(zero_copy_only=False)

    def passes(self, source: int, place: str, texts: Sequence[str]) -> bool:
        """Whether a record of the source may be used; DataError once too many of its rows are bad."""
        found = next(filter(None, map(self._pattern.search, texts)), None)
        if found is None:
            return True
        counts = self._counts[source]
        counts.add_unused(
            place, Unused(f"the text contains the tokenizer's control token {found.group()}")
        )
        counts.refuse_beyond(self._max_bad_fraction, self._labels[source])
        return False


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """The texts that the tokenizer reads as control tokens.

    The token for unknown words is none of them, unless it doubles as another one.
    """
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    roles = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
    return frozenset(special - ({tokenizer.unk_token} - roles))
