from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from rlhf_pipeline.data.sources.docs_table import markdown_table
from rlhf_pipeline.data.sources.lookup import MODULES

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "data.md"


def test_the_documentation_contains_exactly_the_table() -> None:
    found = re.search(
        r"<!-- sources -->\n(.*?)\n<!-- /sources -->", DOCUMENTATION.read_text(), flags=re.DOTALL
    )
    assert found is not None
    assert found[1] == markdown_table(), (
        "print the table with python -m rlhf_pipeline.data.sources.docs_table"
    )


def test_one_line_per_source_in_the_order_of_the_registry() -> None:
    lines = markdown_table().splitlines()
    assert lines[:2] == [
        "| source | holds | columns read | on the hub | description |",
        "| --- | --- | --- | --- | --- |",
    ]
    assert [line.split("`")[1] for line in lines[2:]] == list(MODULES)


def test_a_line_contains_what_is_unusual_on_the_hub() -> None:
    table = markdown_table()
    assert (
        "| `mkqa-Japanese` | demonstrations | `queries`, `answers` | repository `apple/mkqa`, "
        "revision " in table
    )
    assert (
        "| revision `refs/convert/parquet`, subset `all` | Chinese: questions of seven fields"
        in table
    )
    assert "`score_rejected` | split `train_prefs` | answers of models" in table
    assert (
        "| `Dahoas/rm-static` | comparisons | `prompt`, `chosen`, `rejected` |  | Anthropic's "
        "dialogues" in table
    )
    assert "| `synthetic` | comparisons |  | none | a generated toy world" in table


def test_it_prints_the_table() -> None:
    command = [sys.executable, "-m", "rlhf_pipeline.data.sources.docs_table"]
    assert (
        subprocess.run(command, capture_output=True, check=True, text=True).stdout
        == markdown_table() + "\n"
    )
