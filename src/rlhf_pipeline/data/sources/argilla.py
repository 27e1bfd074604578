"""Argilla's preference mixes: answers of models, rated by GPT-4 or a similar model."""

from __future__ import annotations

from functools import partial

from rlhf_pipeline.data.records import Example, Message
from rlhf_pipeline.data.sources.adapter import Row, SkippedRowError, Source, question, rated, text


def parse_orca(row: Row) -> Example:
    """Columns are strings. `status` is "tie" for equal ratings."""
    if text(row, "status") == "tie":
        raise SkippedRowError("the two answers have the same score")
    prompt, system = question(text(row, "input")), text(row, "system")
    if system.strip():
        prompt = (Message("system", system), *prompt)
    return Example(prompt, text(row, "chosen"), text(row, "rejected"))


def _source(name: str, chosen_rating: str, rejected_rating: str, description: str) -> Source:
    return Source(
        name=name,
        kind="comparisons",
        description=description,
        columns=("chosen", "rejected", chosen_rating, rejected_rating),
        parse=partial(rated, chosen_rating=chosen_rating, rejected_rating=rejected_rating),
    )


SOURCES = (
    _source(
        "argilla/dpo-mix-7k",
        "chosen_rating",
        "rejected_rating",
        "a small mix of the best of the other three, 6,750 comparisons",
    ),
    _source(
        "argilla/ultrafeedback-binarized-preferences-cleaned",
        "chosen-rating",
        "rejected-rating",
        "UltraFeedback by the mean of its ratings, without the questions of TruthfulQA, about "
        "61,000 comparisons",
    ),
    _source(
        "argilla/distilabel-capybara-dpo-7k-binarized",
        "rating_chosen",
        "rating_rejected",
        "dialogues of several turns, about 7,600 comparisons",
    ),
    Source(
        name="argilla/distilabel-intel-orca-dpo-pairs",
        kind="comparisons",
        description="Orca's instructions with rated answers, about 12,900 comparisons with ties",
        columns=("system", "input", "chosen", "rejected", "status"),
        parse=parse_orca,
    ),
)
