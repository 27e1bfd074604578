from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from rlhf_pipeline.data.records import Text, Unused
from rlhf_pipeline.data.sources.several_rows import assemble

NAME = "Salesforce/wikitext"
REAL = Path(__file__).parents[3] / ".." / "shared" / "data" / "wikitext-2" / "valid.txt.gz"
VALKYRIA = (
    "= Valkyria =\nValkyria is a <unk> game .\nIt sold well .\n= = Plot = =\nx = 3 and y = 4 ."
)
TOWER = "= Tower Building =\nThe Tower Building is in Little Rock ."


def test_an_article_is_a_text(source_rows) -> None:
    placed = [(f"train:{index}", row) for index, row in enumerate(source_rows[NAME])]
    assert list(assemble(placed)) == [("train:1", Text(VALKYRIA)), ("train:10", Text(TOWER))]


def test_a_text_file_is_one_long_row(source_rows) -> None:
    content = "\n".join(row["text"].rstrip("\n") for row in source_rows[NAME])
    cut = content.index(" It sold well")
    assert list(
        assemble([("a.txt:1", {"text": content[:cut]}), ("a.txt:5", {"text": content[cut:]})])
    ) == [
        ("a.txt:1", Text(VALKYRIA)),
        ("a.txt:5", Text(TOWER)),
    ]


def test_text_before_the_first_title_is_a_text(records, source_rows) -> None:
    assert records(NAME, *source_rows[NAME][6:]) == [
        Text("= = Plot = =\nx = 3 and y = 4 ."),
        Text(TOWER),
    ]


def test_a_malformed_line(records, source_rows) -> None:
    rows = [*source_rows[NAME][:5], {"text": None}]
    assert records(NAME, *rows) == [
        Unused("column 'text' is NoneType, not a string"),
        Text("= Valkyria =\nValkyria is a <unk> game .\nIt sold well ."),
    ]


def test_no_article(records) -> None:
    assert records(NAME, {"text": ""}, {"text": " \n"}) == []


def test_the_real_validation_set_has_60_articles(records) -> None:
    if not REAL.is_file():
        pytest.skip(f"the real data is not there: {REAL}")
    articles = records(NAME, {"text": gzip.decompress(REAL.read_bytes()).decode()})
    assert len(articles) == 60
    assert articles[0].text.startswith(
        "= Homarus gammarus =\nHomarus gammarus , known as the European lobster"
    )
