"""Dahoas: Anthropic's dialogues with a prompt column, and ranked answers to instructions."""

from __future__ import annotations

from rlhf_pipeline.data.records import Example
from rlhf_pipeline.data.sources.adapter import Row, Source, compared, question, text
from rlhf_pipeline.data.sources.anthropic import dialogue


def parse_dialogue(row: Row) -> Example:
    """The prompt ends with "\\n\\nAssistant:"; each answer continues it."""
    prompt = text(row, "prompt")
    return compared(
        dialogue(prompt + text(row, "chosen")), dialogue(prompt + text(row, "rejected"))
    )


def parse_instruction(row: Row) -> Example:
    """The prompt is one turn without speaker marks."""
    return Example(question(text(row, "prompt")), text(row, "chosen"), text(row, "rejected"))


_COLUMNS = ("prompt", "chosen", "rejected")

SOURCES = (
    Source(
        name="Dahoas/rm-static",
        kind="comparisons",
        description="Anthropic's dialogues for reward models, about 76,000 comparisons; "
        "DeepSpeed-Chat's default",
        columns=_COLUMNS,
        parse=parse_dialogue,
    ),
    Source(
        name="Dahoas/full-hh-rlhf",
        kind="comparisons",
        description="Anthropic's helpful and harmless dialogues, about 112,000 comparisons",
        columns=_COLUMNS,
        parse=parse_dialogue,
    ),
    Source(
        name="Dahoas/synthetic-instruct-gptj-pairwise",
        kind="comparisons",
        description="machine-written instructions, answers of a stronger and a weaker model, "
        "about 33,000 comparisons",
        columns=_COLUMNS,
        parse=parse_instruction,
    ),
)
