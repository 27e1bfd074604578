from __future__ import annotations

import pytest

from rlhf_pipeline.data.control_tokens import Screen, control_tokens
from rlhf_pipeline.data.record_files import examples
from rlhf_pipeline.data.records import Example, Message
from rlhf_pipeline.data.row_counts import RowCounts
from rlhf_pipeline.errors import DataError


def test_control_tokens(tokenizer) -> None:
    assert control_tokens(tokenizer) == {"<|pad|>", "<|end|>"}
    tokenizer.add_special_tokens({"unk_token": "<unk>", "additional_special_tokens": ["<|turn|>"]})
    assert control_tokens(tokenizer) == {"<|pad|>", "<|end|>", "<|turn|>"}
    tokenizer.unk_token = "<|end|>"  # GPT-2's unknown token is its EOS
    assert "<|end|>" in control_tokens(tokenizer)


def test_added_words_are_no_control_tokens(tokenizer) -> None:
    tokenizer.add_tokens(["penguin"])
    assert control_tokens(tokenizer) == {"<|pad|>", "<|end|>"}


def screen(tokenizer, *counts: RowCounts, max_bad_fraction: float = 1.0) -> Screen:
    return Screen(tokenizer, ["own", "other"], counts, max_bad_fraction)


def test_sound_texts_pass_and_count_as_nothing(tokenizer) -> None:
    counts = RowCounts(rows=4)
    assert screen(tokenizer, counts).passes(0, "own:1", ["Why?", "", "<|END|> < |end|>", "So."])
    assert not counts.bad


@pytest.mark.parametrize(
    "texts", [["<|end|>", "", ""], ["a", "b<|end|>c", ""], ["a", "b", "c\n<|end|>"]]
)
def test_a_control_token_anywhere_is_refused_and_counted(tokenizer, texts: list[str]) -> None:
    counts = RowCounts(rows=4)
    assert not screen(tokenizer, counts).passes(0, "own:1", texts)
    assert counts.bad == {"the text contains the tokenizer's control token <|end|>": 1}
    assert counts.first_bad == [
        ("own:1", "the text contains the tokenizer's control token <|end|>")
    ]


def test_a_row_counts_once_by_its_first_control_token(tokenizer) -> None:
    counts = RowCounts(rows=4)
    screen(tokenizer, counts).passes(0, "own:1", ["<|pad|><|end|>", "<|end|>"])
    assert counts.bad == {"the text contains the tokenizer's control token <|pad|>": 1}


def test_the_longest_of_several_tokens_is_named(tokenizer) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end", "<|end|>|>"]})
    counts = RowCounts(rows=4)
    screen(tokenizer, counts).passes(0, "own:1", ["<|end|>|>"])
    assert counts.bad == {"the text contains the tokenizer's control token <|end|>|>": 1}


def test_tokens_are_no_patterns(tokenizer) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["[SEP].*"]})
    counts = RowCounts(rows=4)
    assert screen(tokenizer, counts).passes(0, "own:1", ["S...", "[SEP]"])
    assert not screen(tokenizer, counts).passes(0, "own:2", ["a[SEP].*b"])


def test_each_source_answers_for_its_own_rows(tokenizer) -> None:
    own, other = RowCounts(rows=2), RowCounts(rows=4)
    screened = screen(tokenizer, own, other, max_bad_fraction=0.25)
    assert not screened.passes(1, "other:3", ["<|end|>"])  # 1 of 4 is just allowed
    assert (own.bad.total(), other.bad.total()) == (0, 1)
    with pytest.raises(
        DataError, match=r"source own: 1 of 2 rows are unusable.*\n  own:1: the text contains"
    ):
        screened.passes(0, "own:1", ["<|end|>"])


def test_rows_that_were_bad_before_count_as_well(tokenizer) -> None:
    counts = RowCounts(rows=4)
    counts.bad["no answer"] = 1
    with pytest.raises(DataError, match="source own: 2 of 4 rows are unusable"):
        screen(tokenizer, counts, max_bad_fraction=0.25).passes(0, "own:1", ["<|end|>"])


def test_examples_are_screened_in_every_text(tokenizer, write_records) -> None:
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
    sound = screen(tokenizer, *counts).sound(1, examples(write_records("own", *rows)))
    assert sound.tolist() == [True, False, False, True, False]
    assert [place for place, _ in counts[1].first_bad] == ["own:1", "own:2", "own:4"]
    assert counts[1].bad == {
        "the text contains the tokenizer's control token <|end|>": 2,
        "the text contains the tokenizer's control token <|pad|>": 1,
    }
    assert screen(tokenizer, *counts).sound(0, examples(write_records("empty"))).tolist() == []
    with pytest.raises(DataError, match=r"source other: 1 of 5 rows are unusable"):
        screen(tokenizer, RowCounts(), RowCounts(rows=5), max_bad_fraction=0.0).sound(
            1, examples(write_records("b", *rows))
        )
