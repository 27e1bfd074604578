"""The results of `gpu.py` as one page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from gpu_rows import PARTS, Part, Tree

SHARES = ("of the bandwidth, %", "MFU, %")
"""Values that are shares of what a GPU can do."""
WIDTH = 40
"""Characters of 100% in a plot of text."""


def listing(parts: Mapping[str, Part]) -> str:
    """The parts and their rows, with the time that each is expected to take."""
    lines = []
    for name, part in parts.items():
        lines.append(f"{name}: {part.measures} (about {part.minutes:.0f} min)")
        for row in part.rows:
            needs = [f"needs {row.package}"] if row.package not in ("", "kedro") else []
            needs += [f"needs {row.at_least} GPUs"] if row.at_least > 1 else []
            lines.append("  ".join(["   ", row.name, f"{row.seconds} s", *needs]))
    return "\n".join(lines)


def text(value: object) -> str:
    """A value of a table: three digits that count."""
    if not isinstance(value, float):
        return str(value)
    if value and abs(value) < 0.01:
        return f"{value:.2g}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f}"


def line(result: Tree) -> str:
    """A result as a line."""
    values = [f"{name} {text(value)}" for name, value in result.get("values", {}).items() if value]
    about = "; ".join([*values, *filter(None, [result.get("reason")])])
    return f"    {result['row']}: {result['verdict']}, {result['seconds']:.0f} s; {about}"


def records(folder: Path) -> list[Tree]:
    """The files of the parts that have run, in the order of the parts."""
    files = [folder / f"{name}.json" for name in PARTS]
    return [json.loads(file.read_text()) for file in files if file.is_file()]


def write(folder: Path) -> Path:
    """Merge what is in the folder into a page beside it; return the page."""
    found, page = records(folder), folder / "report.md"
    if not found:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("# GPUs\n\nNo part has run yet: `make gpu`.\n")
        return page
    sections = ["# GPUs", *map(about, distinct(found)), plot(found, folder), *map(section, found)]
    missing = [name for name in PARTS if name not in [each["part"] for each in found]]
    if missing:
        sections.append(f"Parts that have not run: {', '.join(missing)}.")
    page.write_text("\n\n".join(filter(None, sections)) + "\n")
    return page


def distinct(found: list[Tree]) -> list[tuple[Tree, list[str]]]:
    """The different versions, with the parts that ran with them."""
    groups: list[tuple[Tree, list[str]]] = []
    for record in found:
        parts = next((parts for known, parts in groups if known == record["versions"]), None)
        if parts is None:
            groups.append((record["versions"], parts := []))
        parts.append(record["part"])
    return groups


def about(group: tuple[Tree, list[str]]) -> str:
    """A paragraph: which parts ran with what."""
    known, parts = group
    names = {name: known["GPUs"].count(name) for name in known["GPUs"]}
    gpus = ", ".join(f"{count} x {name}" for name, count in names.items()) or "no GPU: a rehearsal"
    others = [f"{name} {value}" for name, value in known.items() if name != "GPUs" and value]
    return f"{', '.join(parts)}: {gpus}; {', '.join(others)}."


def section(record: Tree) -> str:
    """The table of a part."""
    rows = record["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row.get("values", {})))
    extra = [name for name in ("anchor", "reason") if any(row.get(name) for row in rows)]
    titles = {"anchor": "others, on H100s"}
    head = ["row", "result", *names, *(titles.get(name, name) for name in extra)]
    table = [head, ["---", "---", *["---:"] * len(names), *["---"] * len(extra)]]
    for row in rows:
        values = [text(row.get("values", {}).get(name, "")) for name in names]
        more = [str(row.get(name) or "").replace("|", "/").replace("\n", " ") for name in extra]
        table.append([row["row"], row["verdict"], *values, *more])
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    measures = record["measures"]
    title = f"## {record['part']}\n\n{measures[0].upper()}{measures[1:]}"
    return f"{title}; {record['date']}, {record['seconds']:.0f} s.\n\n" + "\n".join(lines)


def plot(found: list[Tree], folder: Path) -> str:
    """The shares of what a GPU can do: a picture if matplotlib is installed, else text."""
    bars = [
        (f"{record['part']}, {row['row']}: {name.removesuffix(', %')}", row["values"][name])
        for record in found
        for row in record["rows"]
        for name in SHARES
        if name in row.get("values", {})
    ]
    if not bars:
        return ""
    if find_spec("matplotlib") is None:
        width = max(len(label) for label, _ in bars)
        lines = [f"{label:{width}} {'#' * round(WIDTH * v / 100)} {v:.1f}%" for label, v in bars]
        return "\n".join(["```text", *lines, "```"])
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.3 * len(bars)), layout="constrained")
    labels, values = zip(*reversed(bars), strict=True)
    axes.barh(labels, values)
    axes.set_xlabel("% of what the GPU can do")
    figure.savefig(folder / "report.png", dpi=120)
    pyplot.close(figure)
    return "![Share of what the GPU can do, by row](report.png)"
