"""yitingxie/rlhf-reward-datasets: Anthropic's and other dialogues, cut before the last
"Assistant:".

The white space at the cut is not documented, so the parser accepts any: a prompt may lack the empty
line before its first turn, and "Assistant:" may end the prompt or begin the answers.
"""

from __future__ import annotations

from rlhf_pipeline.data.records import Example
from rlhf_pipeline.data.sources.adapter import Row, Source, compared, text
from rlhf_pipeline.data.sources.anthropic import dialogue


def parse(row: Row) -> Example:
    """Join the prompt with each answer, and compare the two dialogues."""
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
