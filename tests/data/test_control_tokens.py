from __future__ import annotations

import pytest

from rlhf_pipeline.data.record_files import RowCounts, examples
from rlhf_pipeline.data.records import Example, Message
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.data.tokenization import ControlTokenFilter, control_tokens
from rlhf_pipeline.errors import DataError


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


def control_token_filter(
    tokenizer, *counts: RowCounts, max_bad_fraction: float = 1.0
) -> ControlTokenFilter:
    return ControlTokenFilter(
        tokenizer, TokenContract.of(tokenizer), ["own", "other"], counts, max_bad_fraction
    )


def test_texts_without_control_tokens_are_accepted_and_not_counted(tokenizer) -> None:
    counts = RowCounts(rows=4)
    assert control_token_filter(tokenizer, counts).accepts(
        0, "own:1", ["Why?", "", "<|END|> < |end|>", "So."]
    )
    assert not counts.bad


@pytest.mark.parametrize(
    "texts", [["<|end|>", "", ""], ["a", "b<|end|>c", ""], ["a", "b", "c\n<|end|>"]]
)
def test_a_control_token_anywhere_is_refused_and_counted(tokenizer, texts: list[str]) -> None:
    counts = RowCounts(rows=4)
    assert not control_token_filter(tokenizer, counts).accepts(0, "own:1", texts)
    assert counts.bad == {"the text contains the tokenizer's control token <|end|>": 1}
    assert counts.first_bad == [
        ("own:1", "the text contains the tokenizer's control token <|end|>")
    ]


def test_a_row_counts_once_by_its_first_control_token(tokenizer) -> None:
    counts = RowCounts(rows=4)
    control_token_filter(tokenizer, counts).accepts(0, "own:1", ["<|pad|><|end|>", "<|end|>"])
    assert counts.bad == {"the text contains the tokenizer's control token <|pad|>": 1}


def test_the_longest_of_several_tokens_is_named(tokenizer) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end", "<|end|>|>"]})
    counts = RowCounts(rows=4)
    control_token_filter(tokenizer, counts).accepts(0, "own:1", ["<|end|>|>"])
    assert counts.bad == {"the text contains the tokenizer's control token <|end|>|>": 1}


def test_tokens_are_not_regular_expressions(tokenizer) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["[SEP].*"]})
    counts = RowCounts(rows=4)
    assert control_token_filter(tokenizer, counts).accepts(0, "own:1", ["S...", "[SEP]"])
    assert not control_token_filter(tokenizer, counts).accepts(0, "own:2", ["a[SEP].*b"])


def test_each_source_has_its_own_counts(tokenizer) -> None:
    own, other = RowCounts(rows=2), RowCounts(rows=4)
    screened = control_token_filter(tokenizer, own, other, max_bad_fraction=0.25)
    assert not screened.accepts(1, "other:3", ["<|end|>"])  # 1 of 4 is just allowed
    assert (own.bad.total(), other.bad.total()) == (0, 1)
    with pytest.raises(
        DataError, match=r"source own: 1 of 2 rows are bad.*\n  own:1: the text contains"
    ):
        screened.accepts(0, "own:1", ["<|end|>"])


def test_earlier_bad_rows_count_as_well(tokenizer) -> None:
    counts = RowCounts(rows=4)
    counts.bad["no answer"] = 1
    with pytest.raises(DataError, match="source own: 2 of 4 rows are bad"):
        control_token_filter(tokenizer, counts, max_bad_fraction=0.25).accepts(
            0, "own:1", ["<|end|>"]
        )


def test_all_texts_of_an_example_are_checked(tokenizer, write_records) -> None:
    turns = (
        Message("system", "Be kind."),
        Message("user", "Why?<|end|>"),
        Message("assistant", "So."),
        Message("user", "Hm."),
    )
    rows = [
        Example((Message("user", "Why?"),), "Because.", "No."),
        Example(turns, "Because.", "No."),
        Example((Message("user", "Why?"),), "<|pad|>Because."),
        Example((Message("user", "Why?"),)),
        Example((Message("user", "Why?"),), "Because.", "No.<|end|>"),
    ]
    counts = [RowCounts(), RowCounts(rows=5)]
    sound = control_token_filter(tokenizer, *counts).usable_rows(
        1, examples(write_records("own", *rows))
    )
    assert sound.tolist() == [True, False, False, True, False]
    assert [place for place, _ in counts[1].first_bad] == ["own:1", "own:2", "own:4"]
    assert counts[1].bad == {
        "the text contains the tokenizer's control token <|end|>": 2,
        "the text contains the tokenizer's control token <|pad|>": 1,
    }
    assert (
        control_token_filter(tokenizer, *counts)
        .usable_rows(0, examples(write_records("empty")))
        .tolist()
        == []
    )
    with pytest.raises(DataError, match=r"source other: 1 of 5 rows are bad"):
        control_token_filter(
            tokenizer, RowCounts(), RowCounts(rows=5), max_bad_fraction=0.0
        ).usable_rows(1, examples(write_records("b", *rows)))
