"""The graph of the pipeline `full`: as Mermaid, which forges draw, and as a picture for the site.

The site has its own picture, because Mermaid's program would come from another server.
"""

from __future__ import annotations

from html import escape
from textwrap import wrap
from typing import NamedTuple

from rlhf_pipeline.pipeline_registry import register_pipelines

WIDTH, BOX, GAP, RAIL, COLOURS = 560, 74, 18, 20, 5


class Stage(NamedTuple):
    """A node of the pipeline."""

    name: str
    does: str
    """The first sentence of the docstring of its function."""
    reads: list[str]
    makes: str


def stages() -> list[Stage]:
    """The nodes of `full` in the order in which they run, with the artifacts they exchange."""
    nodes = register_pipelines()["full"].nodes
    made = {output for node in nodes for output in node.outputs}
    return [
        Stage(
            node.name,
            (node.func.__doc__ or "").split(".\n")[0].split(":")[0].split(";")[0].strip("."),
            [name for name in node.inputs if name in made],
            node.outputs[0],
        )
        for node in nodes
    ]


def mermaid() -> str:
    """A block of Mermaid: an arrow from each stage to those that read its result."""
    rows = stages()
    makers = {stage.makes: stage.name for stage in rows}
    lines = ["flowchart TD"]
    for stage in rows:
        does = stage.does.replace("`", "")
        lines.append(f'    {stage.name}["<b>{stage.name}</b><br>{does}"]')
        lines += [f"    {makers[result]} --> {stage.name}" for result in stage.reads]
    return "\n".join(["```mermaid", *lines, "```"])


def picture() -> str:
    """A figure whose colours follow the theme of the page."""
    rows = stages()
    rails = [each.makes for each in rows if any(each.makes in other.reads for other in rows)]
    left = RAIL * len(rails) + 16
    height = len(rows) * (BOX + GAP)

    def x(result: str) -> int:
        return left - 16 - RAIL * (rails.index(result) + 1) + RAIL // 2

    def colour(result: str) -> str:
        return f"var(--c{rails.index(result) % COLOURS})"

    parts = []
    for row, stage in enumerate(rows):
        y = row * (BOX + GAP) + GAP // 2
        parts.append(
            f'<rect class="box" x="{left}" y="{y}" width="{WIDTH - left - 1}" height="{BOX}" '
            f'rx="6"/><text x="{left + 14}" y="{y + 25}" font-size="16" font-weight="600">'
            f"{stage.name}</text>"
            + "".join(
                f'<text class="does" x="{left + 14}" y="{y + 45 + 16 * i}" font-size="12">'
                f"{escape(line)}</text>"
                for i, line in enumerate(wrap(stage.does.replace("`", ""), 56))
            )
        )
        for place, result in enumerate(stage.reads):
            at = y + BOX * (place + 1) / (len(stage.reads) + 2)
            parts.append(
                f'<path d="M{x(result)} {at:.1f}H{left - 5}l-5 -3.5v7l5 -3.5" '
                f'stroke="{colour(result)}" fill="{colour(result)}"/>'
            )
        if stage.makes not in rails:
            continue
        readers = [i for i, each in enumerate(rows) if stage.makes in each.reads]
        last = readers[-1]
        place = rows[last].reads.index(stage.makes) + 1
        end = last * (BOX + GAP) + GAP // 2 + BOX * place / (len(rows[last].reads) + 2)
        start = y + BOX - 9
        parts.append(
            f'<path d="M{left} {start}H{x(stage.makes)}V{end:.1f}" fill="none" '
            f'stroke="{colour(stage.makes)}" stroke-width="2.5"/>'
            f'<circle cx="{left}" cy="{start}" r="4" fill="{colour(stage.makes)}"/>'
            f'<text x="{WIDTH - 14}" y="{y + 25}" font-size="13" text-anchor="end" '
            f'style="fill:{colour(stage.makes)}">{stage.makes}</text>'
        )
    words = "; ".join(f"{s.name} reads {', '.join(s.reads) or 'the sources'}" for s in rows)
    return (
        f'<figure class="graph"><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(words)}">{"".join(parts)}</svg></figure>'
    )
