from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from rlhf_pipeline.data import record_files
from rlhf_pipeline.data.records import Text
from rlhf_pipeline.data.split import pack
from rlhf_pipeline.data.token_contract import Reader, TokenContract
from rlhf_pipeline.errors import DataError

END = 1
"""Id of <|end|>."""


@pytest.fixture
def packed(tokenizer, split_config, tmp_path: Path) -> Callable[..., dict[str, int]]:
    """Packs folders of texts into blocks."""

    def packed(*sources: Path, block_tokens: int, max_bad_fraction: float = 0.0) -> dict[str, int]:
        named = [{"name": "files", "path": source.name} for source in sources]
        texts = {"sources": named, "block_tokens": block_tokens}
        config = split_config(max_bad_fraction=max_bad_fraction, pretraining=texts)
        reader = Reader(tokenizer, TokenContract.of(tokenizer))
        report = pack(config, reader, sources, tmp_path)
        del report["sources"]
        return report

    return packed


def counts(*numbers: int) -> dict[str, int]:
    names = ("documents", "tokens", "block_tokens", "blocks", "tokens_left_out")
    return dict(zip(names, numbers, strict=True))


def blocks(folder: Path) -> list[list[int]]:
    return Dataset.from_file(str(folder / "pretraining" / "train.arrow"))["input_ids"][:]


def ids(tokenizer, symbols: str) -> list[int]:
    """The ids of single characters that no merge joins; "." stands for <|end|>."""
    return [END if symbol == "." else tokenizer.convert_tokens_to_ids(symbol) for symbol in symbols]


def test_documents_are_joined_by_eos_and_cut_into_blocks(
    write_records, packed, tokenizer, tmp_path: Path
) -> None:
    # ~~~.^^.# ##.~. is the stream; 3 documents of the first source, 1 of the second.
    first = write_records("first", Text("~~~"), Text("^^"), Text("###"))
    second = write_records("second", Text("~"))
    assert packed(first, second, block_tokens=4) == counts(4, 13, 4, 3, 1)
    assert blocks(tmp_path) == [ids(tokenizer, each) for each in ("~~~.", "^^.#", "##.~")]


def test_blocks_span_batches(
    write_records, packed, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "_BATCH_ROWS", 2)
    texts = write_records("texts", Text("~"), Text("^"), Text("#"), Text("~"), Text("^^^^^^^^"))
    # ~.^. #.~. ^^^^^^^^. are the batches: 4, 4 and 9 tokens.
    assert packed(texts, block_tokens=5) == counts(5, 17, 5, 3, 2)
    assert blocks(tmp_path) == [ids(tokenizer, each) for each in ("~.^.#", ".~.^^", "^^^^^")]


def test_less_text_than_a_block_is_an_error(write_records, packed) -> None:
    texts = write_records("texts", Text("~~~"), Text("^^"))
    with pytest.raises(DataError) as error:
        packed(texts, block_tokens=8)
    assert str(error.value) == (
        "split.pretraining: found 7 tokens in 2 texts, expected at least block_tokens=8. "
        "Fix: add text, or lower split.pretraining.block_tokens."
    )
    with pytest.raises(
        DataError, match="found 0 tokens in 0 texts, expected at least block_tokens=2"
    ):
        packed(write_records("empty"), block_tokens=2)


def test_a_text_with_a_control_token_is_a_bad_row(
    write_records, packed, tokenizer, tmp_path: Path
) -> None:
    first = write_records("first", Text("~"), Text("^"))
    second = write_records("second", Text("a<|end|>"), Text("#"), Text("##"))
    with pytest.raises(
        DataError,
        match=r"(?s)source files \(second\): 1 of 3 rows .*second:0: .*control token <\|end\|>",
    ):
        packed(first, second, block_tokens=2)
    # A third of the second source's rows.
    found = packed(first, second, block_tokens=2, max_bad_fraction=1 / 3)
    assert found == counts(4, 9, 2, 4, 1)
    assert blocks(tmp_path) == [ids(tokenizer, pair) for pair in ("~.", "^.", "#.", "##")]


@pytest.mark.parametrize("begins_text", [True, False])
def test_blocks_begin_with_bos_if_the_tokenizer_puts_it_before_text(
    write_records, packed, tokenizer, tmp_path: Path, begins_text: bool
) -> None:
    """GPT-2 and SmolLM2 name a BOS that they never put before text."""
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    if begins_text:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bos)]
        )
    found = packed(write_records("texts", Text("~~~"), Text("^^")), block_tokens=3)
    if begins_text:
        expected = [[bos, *ids(tokenizer, pair)] for pair in ("~~", "~.", "^^")]
    else:
        expected = [ids(tokenizer, three) for three in ("~~~", ".^^")]
    assert blocks(tmp_path) == expected
    assert found == counts(2, 7, 3, len(expected), 1)
