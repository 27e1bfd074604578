"""Texts that would speak to the model in its own control tokens are kept out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

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

    def passes(self, source: int, place: str, texts: Sequence[str]) -> bool:
        """Whether a record of the source may be used; DataError once too many of its rows are bad."""
        found = next(filter(None, map(self._pattern.search, texts)), None)
        if found is None:
            return True
        counts = self._counts[source]
        counts.add_unused(place, Unused(f"the text contains the tokenizer's control token {found.group()}"))
        counts.refuse_beyond(self._max_bad_fraction, self._labels[source])
        return False


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """The texts that the tokenizer reads as control tokens.

    The token for unknown words is none of them, unless it doubles as another one.
    """
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    roles = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
    return frozenset(special - ({tokenizer.unk_token} - roles))
