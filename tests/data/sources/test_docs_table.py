"""The table of sources in docs/data.md. To print it, with the descriptions that it has:

python tests/data/sources/test_docs_table.py
"""

from __future__ import annotations

import re
from pathlib import Path

from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.data.sources.registry import MODULES, find_source

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "data.md"
HEADER = ("holds", "sources")
DESCRIBED = re.compile(r"`([\w./-]+)` \(((?:[^()]|\([^()]*\))*)\)")


def documented() -> str:
    found = re.search(
        r"<!-- sources -->\n(.*?)\n<!-- /sources -->", DOCUMENTATION.read_text(), flags=re.DOTALL
    )
    assert found is not None
    return found[1]


def markdown_table() -> str:
    """One row per kind; the sources are in the order of the registry."""
    described = dict(DESCRIBED.findall(documented()))
    kinds: dict[str, list[str]] = {}
    for source in (find_source(SourceConfig.model_construct(name=name)) for name in MODULES):
        text = described.get(source.name, "DESCRIPTION")
        kinds.setdefault(source.kind, []).append(f"`{source.name}` ({text})")
    lines = [HEADER, ("---",) * len(HEADER)]
    lines += [(kind, ", ".join(sources)) for kind, sources in kinds.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_documentation_contains_exactly_the_table() -> None:
    assert "DESCRIPTION" not in documented()
    assert documented() == markdown_table(), (
        "print the table with python tests/data/sources/test_docs_table.py"
    )


if __name__ == "__main__":
    print(markdown_table())
