"""yitingxie/rlhf-reward-datasets: Anthropic's and other dialogues, cut before the last "Assistant:".

The exact white space at the cut is not documented, so none is relied on: a prompt may lack the empty line before its
first turn, and "Assistant:" may stand at the prompt's end or at the answers' beginning.
"""

from __future__ import annotations

from rlhf_pipeline.data.records import Example
from rlhf_pipeline.data.sources.adapter import Row, Source, compared, text
from rlhf_pipeline.data.sources.anthropic import dialogue


def parse(row: Row) -> Example:
    """The prompt is put together with each answer, and the two dialogues are compared."""
    prompt = text(row, "prompt").strip()
    chosen, rejected = (
        f"\n\n{prompt}\n\n{text(row, column).strip()}" for column in ("chosen", "rejected")
    )
    return compared(dialogue(chosen), dialogue(rejected))


SOURCES = (
    Source(
        name="yitingxie/rlhf-reward-datasets",
        kind="comparisons",
        description="Anthropic's and other English dialogues, about 76,000 comparisons",
        columns=("prompt", "chosen", "rejected"),
        parse=parse,
    ),
)
