"""Data sets of which several rows make a record: pairs of ratings, lines of articles."""

import re

from rlhf_pipeline.data.records import Message, Text, Unused
from rlhf_pipeline.data.sources.adapter import (
    Records,
    Row,
    Rows,
    Source,
    number,
    outcome,
    preferred,
    text,
    turns,
)

_TURN = re.compile(r"<extra_id_1>(User|Assistant)\n")
_TITLE = re.compile(r" = [^=].* = ?")
_SCORE = "helpfulness"


def _pairs(rows: Rows) -> Records:
    """HelpSteer2: choose the more helpful answer of each pair of rows; ties are skipped.

    Wang et al. 2024, "HelpSteer2: Open-source dataset for training top-performing reward models".
    The two answers to a prompt are consecutive rows. A prompt of several turns has the form
    "{user}\\n<extra_id_1>Assistant\\n{answer}\\n<extra_id_1>User\\n{user}".
    """
    first: tuple[str, Row] | None = None
    for place, row in rows:
        rated = outcome(_rated, row)
        if isinstance(rated, Unused):
            yield place, rated
        elif first is None:
            first = place, rated
        elif first[1]["prompt"] == rated["prompt"]:
            opening, later = turns(rated["prompt"], _TURN)
            both = first[1], rated
            answers, scores = (tuple(one[key] for one in both) for key in ("response", _SCORE))
            yield first[0], outcome(preferred, (Message("user", opening), *later), answers, scores)
            first = None
        else:
            yield first[0], Unused("the next row answers another prompt")
            first = place, rated
    if first is not None:  # `samples` ended between the two rows
        yield first[0], Unused("no row follows", bad=False)


def _rated(row: Row) -> Row:
    said = {column: text(row, column) for column in ("prompt", "response")}
    return said | {_SCORE: number(row, _SCORE)}


def _articles(rows: Rows) -> Records:
    """WikiText: yield each article as one text, without blank lines.

    Merity et al. 2016, "Pointer Sentinel Mixture Models". A row is a line: a paragraph, an empty
    line, or a heading with one equals sign per level on each side. A text file is one row of many.
    """
    start, article = "", list[str]()
    for place, row in rows:
        written = outcome(lambda row: text(row, "text"), row)
        if isinstance(written, Unused):
            yield place, written
            continue
        for line in filter(str.strip, written.split("\n")):
            if article and _TITLE.fullmatch(line):
                yield start, Text("\n".join(article))
                article = []
            start = start if article else place
            article.append(line.strip())
    if article:
        yield start, Text("\n".join(article))


SOURCES = (
    Source(
        "nvidia/HelpSteer2", "comparisons", columns=("prompt", "response", _SCORE),
        assemble=_pairs,
    ),
    Source(
        "Salesforce/wikitext", "text", columns=("text",), assemble=_articles,
        subset="wikitext-103-raw-v1",
    ),
)  # fmt: skip
