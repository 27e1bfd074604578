"""The table of sources in docs/data.md. To print it:

python tests/data/sources/test_docs_table.py
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from rlhf_pipeline.data.source import MODULES, find_source
from rlhf_pipeline.data.sources.adapter import Source

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "data.md"
HEADER = ("source", "holds", "columns read", "on the hub", "description")


def markdown_table() -> str:
    """One row per source, in the order of the registry."""
    lines = [HEADER, ("---",) * len(HEADER), *(cells(find_source(name)) for name in MODULES)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(source: Source) -> tuple[str, ...]:
    columns = ", ".join(f"`{column}`" for column in source.columns)
    return f"`{source.name}`", source.kind, columns, on_the_hub(source), source.description


def on_the_hub(source: Source) -> str:
    """What is read from the hub, if it is not split "train" of the repository `source.name`."""
    if source.generate is not None or source.local_only:
        return "none"
    unusual = {
        "repository": source.hub,
        "revision": source.revision,
        "subset": source.subset,
        "split": source.split if source.split != "train" else None,
    }
    return ", ".join(f"{word} `{value}`" for word, value in unusual.items() if value is not None)


def test_the_documentation_contains_exactly_the_table() -> None:
    found = re.search(
        r"<!-- sources -->\n(.*?)\n<!-- /sources -->", DOCUMENTATION.read_text(), flags=re.DOTALL
    )
    assert found is not None
    assert found[1] == markdown_table(), (
        "print the table with python tests/data/sources/test_docs_table.py"
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
    assert "| `synthetic` | comparisons |  | none | a generated world" in table


def test_it_prints_the_table(capsys) -> None:
    runpy.run_path(__file__, run_name="__main__")
    assert capsys.readouterr().out == markdown_table() + "\n"


if __name__ == "__main__":
    print(markdown_table())
