"""MkDocs: pages that live elsewhere in the project, links between pages, and the graph."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import graph
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PROJECT = Path(__file__).parents[2]
PAGES = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "tutorials/notebook.md": "notebooks/tutorial.ipynb",
}
"""Pages of the site that are not in docs/, with their files in the project."""
MERMAID = re.compile(r"^```mermaid$.*?^```$", re.MULTILINE | re.DOTALL)
"""The graph; the site has its own picture, because Mermaid needs a program from elsewhere."""
LINK = re.compile(r"(!?)\[((?:[^\]`]|`[^`]*`)*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for page, source in PAGES.items():
        text = (PROJECT / source).read_text()
        content = notebook(json.loads(text)) if source.endswith(".ipynb") else text
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Draw the graph, and let links reach the pages of the site."""
    markdown = MERMAID.sub(lambda _: graph.picture(), markdown)
    here = page.file.src_uri
    pieces = FENCE.split(markdown)
    pieces[::2] = [LINK.sub(lambda m: link(m, here), cells(text)) for text in pieces[::2]]
    return "".join(pieces)


def link(match: re.Match[str], page: str) -> str:
    """A link of the project as one of the site; one to source code as its text."""
    image, text, target = match.groups()
    path, _, fragment = target.partition("#")
    source = PROJECT / PAGES.get(page, f"docs/{page}")
    file = os.path.relpath((source.parent / path).resolve(), PROJECT)
    goal = {source: page for page, source in PAGES.items()}.get(file)
    if goal is None:
        if not file.startswith("docs/"):
            return text
        goal = file.removeprefix("docs/")
    relative = os.path.relpath(goal, Path(page).parent)
    return f"{image}[{text}]({relative}{'#' + fragment if fragment else ''})"


def cells(text: str) -> str:
    r"""Write `\|` within code in a table as GitHub shows it: |."""
    rows = [
        re.sub(r"`[^`]*`", lambda m: m[0].replace(r"\|", "|"), line) if line[:1] == "|" else line
        for line in text.split("\n")
    ]
    return "\n".join(rows)


def notebook(content: dict[str, Any]) -> str:
    """The cells of a notebook as Markdown."""
    blocks = []
    for cell in content["cells"]:
        text = "".join(cell["source"])
        blocks.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    return "\n\n".join(blocks)
