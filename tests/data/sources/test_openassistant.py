from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhf_pipeline.data.records import Example, Message, Unused
from rlhf_pipeline.data.sources.several_rows import assemble
from rlhf_pipeline.errors import DataError

NAME = "OpenAssistant/oasst1"
ROOT = Message("user", "What is monopsony?")
FIRST = Example((ROOT,), "A market with one buyer, who sets the price.", "A board game.")
LATER = Example(
    (
        ROOT,
        Message("assistant", "A market with one buyer, who sets the price."),
        Message("user", "Is it rare?"),
    ),
    "In labour markets it is not.",
    "No.",
)
FEW = Unused("fewer than two ranked answers", bad=False)
REMOVED = Unused("a message of the thread was removed", bad=False)


@pytest.fixture
def tree(source_rows) -> dict[str, dict[str, Any]]:
    """The messages by their one-letter names; k is a separate tree."""
    return {row["message_id"]: row for row in source_rows[NAME]}


def test_the_best_answer_against_the_worst(source_rows) -> None:
    placed = [(f"train:{index}", row) for index, row in enumerate(source_rows[NAME])]
    assert list(assemble(placed)) == [
        ("train:0", FIRST),
        ("train:2", FEW),
        ("train:5", LATER),
        ("train:9", FEW),
    ]


def test_a_deleted_answer_does_not_compete(records, tree) -> None:
    tree["i"]["deleted"] = True
    assert records(NAME, *tree.values()) == [
        replace(FIRST, rejected="A market with one buyer."),
        FEW,
        LATER,
        FEW,
    ]


def test_messages_after_a_removed_one_are_skipped(records, tree) -> None:
    tree["e"]["review_result"] = False
    expected = Example((ROOT,), "A market with one buyer.", "A board game.")
    assert records(NAME, *tree.values()) == [expected, FEW, REMOVED, FEW]


def test_a_message_that_is_not_reviewed_yet_counts(records, tree) -> None:
    tree["e"]["review_result"] = None
    assert records(NAME, *tree.values()) == [FIRST, FEW, LATER, FEW]


def test_equal_ranks_are_a_tie(records, tree) -> None:
    tree["g"]["rank"] = 0
    assert records(NAME, *tree.values())[2] == Unused(
        "the two answers have the same score", bad=False
    )


def test_one_ranked_answer_is_too_few(records, tree) -> None:
    tree["g"]["rank"] = None
    assert records(NAME, *tree.values())[2] == FEW


def test_a_missing_message_makes_its_thread_bad(records, tree) -> None:
    del tree["e"]
    expected = Example((ROOT,), "A market with one buyer.", "A board game.")
    missing = Unused("the message that it answers is not listed before it")
    assert records(NAME, *tree.values()) == [expected, FEW, missing, FEW]


def test_trees_in_separate_rows_are_refused(source_rows) -> None:
    *first, other = source_rows[NAME]
    rows = enumerate([*first[:5], other, *first[5:]], start=1)
    with pytest.raises(
        DataError,
        match=r"^messages.jsonl:7: found tree tree-1 again, .* Fix: sort the rows by",
    ):
        list(assemble((f"messages.jsonl:{line}", row) for line, row in rows))


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("role", "system", "column 'role' is neither prompter nor assistant"),
        ("text", None, "column 'text' is NoneType, not a string"),
        ("rank", "0", "column 'rank' is str, not a whole number"),
        ("message_tree_id", None, "column 'message_tree_id' is NoneType, not a string"),
        ("parent_id", 7, "column 'parent_id' is int, not a string"),
    ],
)
def test_a_malformed_message(records, tree, column: str, value: object, reason: str) -> None:
    tree["k"][column] = value
    assert records(NAME, *tree.values()) == [Unused(reason), FIRST, FEW, LATER]
