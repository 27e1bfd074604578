"""The table of sources in docs/data.md.

python -m rlhf_pipeline.data.sources.docs_table
"""

from __future__ import annotations

from rlhf_pipeline.data.sources.adapter import Source
from rlhf_pipeline.data.sources.lookup import MODULES, find_source

_HEADER = ("source", "holds", "columns read", "on the hub", "description")


def markdown_table() -> str:
    """One row per source, in the order of the registry."""
    lines = [_HEADER, ("---",) * len(_HEADER), *(_cells(find_source(name)) for name in MODULES)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(source: Source) -> tuple[str, ...]:
    columns = ", ".join(f"`{column}`" for column in source.columns)
    return f"`{source.name}`", source.kind, columns, _on_the_hub(source), source.description


def _on_the_hub(source: Source) -> str:
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


if __name__ == "__main__":
    print(markdown_table())
