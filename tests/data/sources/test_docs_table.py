"""The table of sources in docs/data.md. To print it, with the descriptions that it has:

python tests/data/sources/test_docs_table.py
"""

from __future__ import annotations

import re
from pathlib import Path

from rlhf_pipeline.data.source import MODULES, find_source
from rlhf_pipeline.data.sources.adapter import Source

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "data.md"
HEADER = ("source", "holds", "columns read", "on the hub", "description")


def documented() -> str:
    found = re.search(
        r"<!-- sources -->\n(.*?)\n<!-- /sources -->", DOCUMENTATION.read_text(), flags=re.DOTALL
    )
    assert found is not None
    return found[1]


def markdown_table() -> str:
    """One row per source, in the order of the registry."""
    rows = [line.strip("| ").split(" | ") for line in documented().splitlines()]
    described = {name: description for name, *_, description in rows}
    sources = [cells(find_source(name)) for name in MODULES]
    lines = [HEADER, ("---",) * len(HEADER)]
    lines += [(*cell, described.get(cell[0], "DESCRIPTION")) for cell in sources]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(source: Source) -> tuple[str, ...]:
    columns = ", ".join(f"`{column}`" for column in source.columns)
    return f"`{source.name}`", source.kind, columns, on_the_hub(source)


def on_the_hub(source: Source) -> str:
    """What is read from the hub, if it is not split "train" of the repository."""
    if source.generate is not None or source.local_only:
        return "none"
    unusual = {
        "revision": source.revision,
        "subset": source.subset,
        "split": source.split if source.split != "train" else None,
    }
    return ", ".join(f"{word} `{value}`" for word, value in unusual.items() if value is not None)


def test_the_documentation_contains_exactly_the_table() -> None:
    assert "DESCRIPTION" not in documented()
    assert documented() == markdown_table(), (
        "print the table with python tests/data/sources/test_docs_table.py"
    )


if __name__ == "__main__":
    print(markdown_table())
