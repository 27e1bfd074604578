"""The code of a documentation page: new files, and edits of files of the project.

A line that begins with a path in backticks labels the blocks below it. A `python` block directly
below its label is the whole file; a `diff` block is an edit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

LABEL = re.compile(r"`([\w./-]+\.py)`( is empty\b.*|:)?")


@dataclass(frozen=True)
class Change:
    """A file to create, or an edit of a file."""

    path: str
    text: str
    is_edit: bool

    def apply(self, root: Path) -> None:
        """Make the change in a copy of the project."""
        file = root / self.path
        if not self.is_edit:
            assert not file.exists(), f"{self.path} exists"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.text)
            return
        lines = self.text.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if not line.startswith("+"))
        after = "".join(line[1:] for line in lines if not line.startswith("-"))
        text = file.read_text()
        assert text.count(before) == 1, f"{self.path} does not contain once:\n{before}"
        file.write_text(text.replace(before, after))


def documented_changes(page: Path, section: str | None = None) -> list[Change]:
    """The changes of a page in their order, or those of one section."""
    changes: list[Change] = []
    path, heading, fence, block = "", "", "", []
    for line in page.read_text().splitlines():
        if fence and line != "```":
            block.append(f"{line}\n")
        elif fence:
            if path and fence in ("python", "diff") and section in (None, heading):
                changes.append(Change(path, "".join(block), is_edit=fence == "diff"))
            fence, block = "", []
        elif line.startswith("```"):
            fence = line.removeprefix("```") or "text"
        elif line.startswith("## "):
            heading, path = line.removeprefix("## "), ""
        elif (label := LABEL.match(line)) and label[2]:
            path = label[1]
            if label[2].startswith(" is empty") and section in (None, heading):
                changes.append(Change(path, "", is_edit=False))
                path = ""
    return changes
