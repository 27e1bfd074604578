"""Counts the lines of each room of the package and compares them with the roofs in pyproject.toml.

A line of code is one that is neither blank, a comment, an import, nor part of a docstring.
"""

import ast
import sys
import tomllib
from collections import Counter
from pathlib import Path

PROJECT = Path(__file__).parents[1]
PACKAGE = PROJECT / "src" / "rlhf_pipeline"


def code_lines(text: str) -> int:
    """The lines of a module that are code."""
    apart: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_import or (is_text and isinstance(node.value.value, str)):
            apart.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(
        number not in apart and bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in lines
    )


def main() -> int:
    """Print lines and lines of code of each room beside its roof; 1 if one is above it."""
    config = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    roofs: dict[str, list[int]] = config["tool"]["rlhf-pipeline"]["roofs"]
    files, lines, code = Counter[str](), Counter[str](), Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        first, *rest = path.relative_to(PACKAGE).parts
        room, text = (first if rest else "top level"), path.read_text(encoding="utf-8")
        files[room] += 1
        lines[room] += len(text.splitlines())
        code[room] += code_lines(text)
    print(f"{'room':12}{'files':>6}{'lines':>8}{'roof':>8}{'code':>8}{'roof':>8}")
    above = []
    for room in sorted(lines):
        if room not in roofs:
            above.append(f"{room} has no roof")
        roof, code_roof = roofs.get(room, (0, 0))
        print(f"{room:12}{files[room]:6}{lines[room]:8}{roof:8}{code[room]:8}{code_roof:8}")
        if lines[room] > roof or code[room] > code_roof:
            above.append(f"{room}: found {lines[room]} lines with {code[room]} of code, expected "
                         f"at most {roof} with {code_roof}")  # fmt: skip
    roof, code_roof = (sum(column) for column in zip(*roofs.values(), strict=True))
    print(f"{'all':12}{files.total():6}{lines.total():8}{roof:8}{code.total():8}{code_roof:8}")
    for fault in above:
        print(f"{fault}. Fix: what is new replaces something; a roof that rises lowers another")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
