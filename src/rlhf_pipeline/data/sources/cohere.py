"""MIRACL by Cohere: a passage that answers a query against one that does not, judged by people.

Zhang et al. 2023, "MIRACL: A Multilingual Retrieval Dataset Covering 18 Diverse Languages". The
embeddings in column `emb` are not read.
"""

from __future__ import annotations

from rlhf_pipeline.data.records import Example
from rlhf_pipeline.data.sources.adapter import Row, SkippedRowError, Source, items, question, text


def parse(row: Row) -> Example:
    """The first passage of each kind; without a negative passage, the row is a demonstration."""
    relevant, others = items(row, "positive_passages", dict), items(row, "negative_passages", dict)
    if not relevant:
        raise SkippedRowError("no passage answers the query")
    return Example(
        question(text(row, "query")),
        text(relevant[0], "text"),
        text(others[0], "text") if others else None,
    )


def _source(code: str, language: str) -> Source:
    return Source(
        name=f"Cohere/miracl-{code}-queries-22-12",
        kind="comparisons",
        description=f"{language}: queries with passages of Wikipedia that do and do not answer "
        "them",
        columns=("query", "positive_passages", "negative_passages"),
        parse=parse,
    )


SOURCES = (_source("zh", "Chinese"), _source("ja", "Japanese"))
