import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rlhf_pipeline.data.record_files import example_batch
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.data.row_counts import RowCounts
from rlhf_pipeline.data.token_contract import TokenContract, Tokenizer, control_tokens


class ControlTokenFilter:
    """Rejects records that contain a control token, and counts them as bad rows.

    A control token in a text would end a response or forge a turn.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        contract: TokenContract,
        labels: Sequence[str],
        counts: Sequence[RowCounts],
        max_bad_fraction: float,
    ) -> None:
        self._labels, self._counts, self._max_bad_fraction = labels, counts, max_bad_fraction
        # Longest first: one token may be the beginning of another.
        tokens = sorted(control_tokens(tokenizer, contract), key=lambda token: (-len(token), token))
        self._pattern = re.compile("|".join(map(re.escape, tokens)))

    def usable_rows(self, source: int, examples: pa.Table) -> np.ndarray:
        """The examples without a control token, as (N,) bool; raises like `accepts`."""
        usable = []
        for batch in map(example_batch, examples.to_batches()):
            for name, prompt, *answers in zip(
                batch.ids, batch.prompts, batch.chosen, batch.rejected, strict=True
            ):
                texts = [message["content"] for message in prompt]
                texts += [answer for answer in answers if answer is not None]
                usable.append(self.accepts(source, name, texts))
        return np.array(usable, bool)

    def accepts(self, source: int, place: str, texts: Sequence[str]) -> bool:
        """Whether the texts of a record contain no control token.

        Raises DataError if the source has more bad rows than `max_bad_fraction` allows.
        """
        found = next(filter(None, map(self._pattern.search, texts)), None)
        if found is None:
            return True
        counts = self._counts[source]
        counts.add_unused(
            place, Unused(f"the text contains the tokenizer's control token {found.group()}")
        )
        counts.check_bad_fraction(self._max_bad_fraction, self._labels[source])
        return False
