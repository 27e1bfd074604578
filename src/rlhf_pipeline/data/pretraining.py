"""Plain text for PPO's language-model loss (ptx, Ouyang et al. 2022, equation 2), packed into blocks of equal length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from rlhf_pipeline.data.control_tokens import Screen
from rlhf_pipeline.data.record_files import texts
from rlhf_pipeline.data.tables import PRETRAINING, TableWriter
from rlhf_pipeline.data.tokenization import encode, one_ahead
from rlhf_pipeline.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32()))])


def pack(
    sources: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    block_tokens: int,
    output: Path,
    screen: Screen,
) -> dict[str, int]:
    """Join the sources' documents, an EOS after each, and write them as blocks of `block_tokens` tokens.

    What `screen` refuses is left out.

    Returns:
        documents, tokens (EOS included), block_tokens, blocks, tokens_left_out: fewer than a block, at the end.

    Raises:
        DataError: there is less text than a block, or too many texts are refused.
    """
    documents, tokens, blocks = 0, 0, 0
    rest = np.empty(0, np.int32)
    writer = TableWriter(output / PRETRAINING, _SCHEMA)
    batches = (
        [
            text
            for place, text in zip(places, batch, strict=True)
            if screen.passes(source, place, [text])
        ]
        for source, folder in enumerate(sources)
        for places, batch in texts(folder)
    )
    for batch, ids in one_ahead(batches, lambda batch: encode(batch, tokenizer)):
        documents += len(batch)
        joined = np.fromiter(_with_ends(ids, int(tokenizer.eos_token_id)), np.int32)
        tokens += len(joined)
        rest = np.concatenate([rest, joined])
        full = len(rest) // block_tokens
        if full:
            writer.write(
                {"input_ids": list(rest[: full * block_tokens].reshape(full, block_tokens))}
            )
        blocks += full
        rest = rest[full * block_tokens :]
    writer.close()
    if not blocks:
        raise DataError(
            f"split.pretraining: {documents} texts with {tokens} tokens fill no block of block_tokens={block_tokens}. "
            "Add text, or lower split.pretraining.block_tokens."
        )
    return {
        "documents": documents,
        "tokens": tokens,
        "block_tokens": block_tokens,
        "blocks": blocks,
        "tokens_left_out": len(rest),
    }


def _with_ends(documents: list[list[int]], eos_id: int) -> Iterator[int]:
    for document in documents:
        yield from document
        yield eos_id
