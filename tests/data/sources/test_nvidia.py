from __future__ import annotations

from rlhf_pipeline.data.records import Example, Message, Unused
from rlhf_pipeline.data.sources.several_rows import assemble

NAME = "nvidia/HelpSteer2"
NOTE = Example((Message("user", "c#"),), "C# is a language of Microsoft.", "A musical note.")
DIALOGUE = Example(
    (
        Message("user", "What is C#?"),
        Message("assistant", "A language."),
        Message("user", "By whom?"),
    ),
    "Microsoft.",
    "Unknown.",
)
TIE = Unused("the two answers have the same score", bad=False)


def test_two_rows_are_a_comparison(source_rows) -> None:
    placed = [(f"train:{index}", row) for index, row in enumerate(source_rows[NAME])]
    assert list(assemble(placed)) == [("train:0", NOTE), ("train:2", DIALOGUE), ("train:4", TIE)]


def test_a_missing_row_affects_only_its_partner(source_rows) -> None:
    placed = [(f"train:{index}", row) for index, row in enumerate(source_rows[NAME]) if index != 1]
    assert list(assemble(placed)) == [
        ("train:0", Unused("the next row answers another prompt")),
        ("train:2", DIALOGUE),
        ("train:4", TIE),
    ]


def test_a_malformed_row_affects_only_its_partner(records, source_rows) -> None:
    rows = source_rows[NAME]
    rows[0]["helpfulness"] = None
    assert records(NAME, *rows) == [
        Unused("column 'helpfulness' is not a finite number"),
        Unused("the next row answers another prompt"),
        DIALOGUE,
        TIE,
    ]


def test_an_incomplete_last_pair_is_skipped(records, source_rows) -> None:
    assert records(NAME, *source_rows[NAME][:3]) == [NOTE, Unused("no row follows", bad=False)]
