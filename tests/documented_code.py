"""The code of a documentation page: new files.

A line that begins with a path in backticks labels a file: the `python` block directly below it, or
nothing, if it says that the file is empty.
"""

import re
from pathlib import Path

FILE = re.compile(
    r"^`([\w./-]+\.py)`(?: is empty\b[^\n]*|:\n\n```python\n(.*?)^```)$", re.MULTILINE | re.DOTALL
)


def documented_files(page: Path) -> dict[str, str]:
    """The files of a page in their order: text by path."""
    return dict(FILE.findall(page.read_text()))
