from __future__ import annotations

import pytest

from rlhf_pipeline.data.records import RowCounts
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.data.tokenization import ControlTokenFilter, control_tokens


def controls(tokenizer) -> frozenset[str]:
    return control_tokens(tokenizer, TokenContract.of(tokenizer))


def test_control_tokens(tokenizer) -> None:
    assert controls(tokenizer) == {"<|pad|>", "<|end|>"}
    tokenizer.add_special_tokens({"unk_token": "<unk>", "additional_special_tokens": ["<|turn|>"]})
    assert controls(tokenizer) == {"<|pad|>", "<|end|>", "<|turn|>"}
    tokenizer.unk_token = "<|end|>"  # GPT-2's unknown token is its EOS
    assert "<|end|>" in controls(tokenizer)


def test_added_words_are_not_controls(tokenizer) -> None:
    tokenizer.add_tokens(["penguin"])
    assert controls(tokenizer) == {"<|pad|>", "<|end|>"}


def test_an_unknown_token_that_ends_responses_is_a_control_token(tokenizer) -> None:
    tokenizer.add_special_tokens({"unk_token": "<|endoftext|>"})  # as in Qwen2.5
    contract = TokenContract.of(tokenizer, [1, tokenizer.unk_token_id])
    assert control_tokens(tokenizer, contract) == {"<|pad|>", "<|end|>", "<|endoftext|>"}


def control_token_filter(tokenizer, max_bad_fraction: float = 1.0) -> ControlTokenFilter:
    return ControlTokenFilter(tokenizer, TokenContract.of(tokenizer), max_bad_fraction)


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["Why?", "", "<|END|> < |end|>", "[SEP] [S...", "So."], None),
        (["<|end|>", "", ""], "<|end|>"),
        (["a", "b<|end|>c", ""], "<|end|>"),
        (["a", "b", "c\n<|end|>"], "<|end|>"),
        (["<|pad|><|end|>", "<|end|>"], "<|pad|>"),  # a row counts once, by its first token
        (["<|end|>|>"], "<|end|>|>"),  # the longest
        (["a[SEP].*b"], "[SEP].*"),  # no regular expression
    ],
)
def test_a_control_token_anywhere_is_a_bad_row(tokenizer, texts: list[str], found: str) -> None:
    added = ["<|end", "<|end|>|>", "[SEP].*"]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    counts = RowCounts(rows=4)
    accepted = control_token_filter(tokenizer).accepts("own", counts, "own:1", texts)
    assert accepted == (found is None)
    reason = f"the text contains the tokenizer's control token {found}"
    assert counts.first_bad == ([] if found is None else [("own:1", reason)])
    assert counts.bad.total() == len(counts.first_bad)
