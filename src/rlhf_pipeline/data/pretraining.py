"""Pack plain text into blocks for PPO's language-model loss (ptx).

Source: Ouyang et al. 2022, equation 2.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.control_tokens import ControlTokenFilter
from rlhf_pipeline.data.record_files import ArrowWriter, texts
from rlhf_pipeline.data.row_counts import RowCounts
from rlhf_pipeline.data.token_contract import TokenContract, Tokenizer
from rlhf_pipeline.data.tokenization import encode, one_ahead
from rlhf_pipeline.errors import DataError

_SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32()))])


def pack(
    config: SplitConfig,
    labels: Sequence[str],
    tokenizer: Tokenizer,
    contract: TokenContract,
    sources: Sequence[Path],
    output: Path,
) -> dict[str, Any]:
    """Join all documents, an EOS after each, and write them as blocks of equal length.

    Each block begins with BOS if the tokenizer puts one before text: such a model has never seen
    text without it. Documents with control tokens are left out, and count as bad rows. Raises
    DataError if the text does not fill one block, or too many rows are bad.

    Returns:
        The part `pretraining` of the report. Tokens include EOS, but not BOS; those of the
        incomplete last block are left out.
    """
    assert config.pretraining is not None
    block_tokens = config.pretraining.block_tokens
    counts = [RowCounts.read(folder) for folder in sources]
    control_tokens = ControlTokenFilter(
        tokenizer, contract, labels, counts, config.max_bad_fraction
    )
    first = tokenizer("")["input_ids"][:1]  # BOS if the tokenizer puts one before text, as Llama's
    bos = np.array(first if first == [tokenizer.bos_token_id] else [], np.int32)
    text_tokens = block_tokens - len(bos)
    documents, tokens, blocks = 0, 0, 0
    rest = np.empty(0, np.int32)
    writer = ArrowWriter(output / "pretraining" / "train.arrow", _SCHEMA)
    batches = _accepted_texts(sources, control_tokens)
    for batch, ids in one_ahead(batches, lambda batch: encode(batch, tokenizer)):
        documents += len(batch)
        joined = [token for document in ids for token in (*document, contract.eos_id)]
        tokens += len(joined)
        rest = np.concatenate([rest, np.array(joined, np.int32)])
        full = len(rest) // text_tokens
        if full:
            text = rest[: full * text_tokens].reshape(full, text_tokens)
            rows = np.hstack([np.tile(bos, (full, 1)), text])
            writer.write([{"input_ids": ids} for ids in rows])
        blocks += full
        rest = rest[full * text_tokens :]
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


def _accepted_texts(
    sources: Sequence[Path], control_tokens: ControlTokenFilter
) -> Iterator[list[str]]:
    """Batches of the texts without control tokens."""
    for source, folder in enumerate(sources):
        for places, batch in texts(folder):
            rows = zip(places, batch, strict=True)
            yield [text for place, text in rows if control_tokens.accepts(source, place, [text])]
