"""TL;DR by trl-lib: Reddit posts with summaries; the prompt ends with "TL;DR:".

Völske et al. 2017, "TL;DR: Mining Reddit to Learn Automatic Summarization". Comparisons: Stiennon
et al. 2020, "Learning to summarize from human feedback".
"""

from __future__ import annotations

from rlhf_pipeline.data.records import Example
from rlhf_pipeline.data.sources.adapter import Row, Source, question, text


def parse_demonstration(row: Row) -> Example:
    """The post and its author's summary, without the space between them."""
    return Example(question(text(row, "prompt")), text(row, "completion").strip())


def parse_comparison(row: Row) -> Example:
    """The post and two summaries, without the space between them."""
    return Example(
        question(text(row, "prompt")), text(row, "chosen").strip(), text(row, "rejected").strip()
    )


SOURCES = (
    Source(
        name="trl-lib/tldr",
        kind="demonstrations",
        description="Reddit posts with their authors' summaries, about 117,000",
        columns=("prompt", "completion"),
        parse=parse_demonstration,
    ),
    Source(
        name="trl-lib/tldr-preference",
        kind="comparisons",
        description="summaries of Reddit posts and news, compared by people, about 93,000 "
        "comparisons",
        columns=("prompt", "chosen", "rejected"),
        parse=parse_comparison,
    ),
)
