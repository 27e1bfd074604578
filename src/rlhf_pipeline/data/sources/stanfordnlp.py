"""Stanford Human Preferences: two comments on one Reddit post, the better one by votes.

Ethayarajh et al. 2022, "Understanding Dataset Difficulty with V-Usable Information". The data set
has no ties: one comment has more votes although it was written later.
"""

from __future__ import annotations

from rlhf_pipeline.data.records import Example
from rlhf_pipeline.data.sources.adapter import (
    MalformedRowError,
    Row,
    Source,
    number,
    preferred,
    question,
    text,
)


def parse(row: Row) -> Example:
    """`labels` is 1 if A is preferred, 0 if B is."""
    label = number(row, "labels")
    if label not in (0, 1):
        raise MalformedRowError("column 'labels' is neither 0 nor 1")
    return preferred(
        question(text(row, "history")),
        (text(row, "human_ref_A"), text(row, "human_ref_B")),
        (label, 1 - label),
    )


SOURCES = (
    Source(
        name="stanfordnlp/SHP",
        kind="comparisons",
        description="questions to 18 subreddits with two comments, compared by votes, about "
        "349,000 comparisons",
        columns=("history", "human_ref_A", "human_ref_B", "labels"),
        parse=parse,
    ),
)
