"""Data sets of which several rows make a record: ratings, trees of messages, lines of articles."""

import re
from collections import defaultdict

from rlhf_pipeline.data.records import Example, Message, Text, Unused
from rlhf_pipeline.data.sources.adapter import (
    MalformedRowError,
    Records,
    Row,
    Rows,
    SkippedRowError,
    Source,
    field,
    messages,
    number,
    outcome,
    preferred,
    text,
    turns,
)
from rlhf_pipeline.errors import DataError

_TURN = re.compile(r"<extra_id_1>(User|Assistant)\n")
_TITLE = re.compile(r" = [^=].* = ?")
_SCORE = "helpfulness"
_COLUMNS = (
    "message_id", "parent_id", "message_tree_id", "role", "text", "rank", "deleted",
    "review_result",
)  # fmt: skip


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


def _trees(rows: Rows) -> Records:
    """OpenAssistant: compare the best with the worst of two or more ranked answers to a message.

    Köpf et al. 2023, "OpenAssistant Conversations - Democratizing Large Language Model Alignment".
    A row is a message; rank 0 is the best. The messages of a tree are consecutive, each after the
    one that it answers, or DataError is raised; so one tree at a time is in memory.
    """
    tree: list[tuple[str, Row]] = []
    name, finished = "", set[str]()
    for place, row in rows:
        message = outcome(_message, row)
        if isinstance(message, Unused):
            yield place, message
            continue
        if tree and message["message_tree_id"] != name:
            yield from _comparisons(tree)
            finished.add(name)
            tree = []
        name = message["message_tree_id"]
        if name in finished:
            raise DataError(
                f"{place}: found tree {name} again, expected all messages of a tree in "
                "consecutive rows. Fix: sort the rows by message_tree_id."
            )
        tree.append((place, message))
    yield from _comparisons(tree)


def _message(row: Row) -> Row:
    """A checked row, in which `removed` says that it was deleted or rejected by its reviewers."""
    for column in _COLUMNS:
        field(row, column, object)
    for column in ("role", "message_id", "message_tree_id", "text"):
        text(row, column)
    if row["role"] not in ("prompter", "assistant"):
        raise MalformedRowError("column 'role' is neither prompter nor assistant")
    for column, kind in (("parent_id", str), ("rank", int)):
        if row[column] is not None:
            field(row, column, kind)
    return row | {"removed": bool(row["deleted"]) or row["review_result"] is False}


def _comparisons(tree: list[tuple[str, Row]]) -> Records:
    """Yield one result for each user message of the tree."""
    answers: dict[str | None, list[Row]] = defaultdict(list)
    for _, row in tree:
        if row["role"] == "assistant":
            answers[row["parent_id"]].append(row)
    threads: dict[str, tuple[Row, ...] | None] = {}
    for place, row in tree:
        before = () if row["parent_id"] is None else threads.get(row["parent_id"])
        thread = threads[row["message_id"]] = None if before is None else (*before, row)
        if row["role"] == "prompter":
            yield place, outcome(_comparison, thread, answers[row["message_id"]])


def _comparison(thread: tuple[Row, ...] | None, answers: list[Row]) -> Example:
    if thread is None:
        raise MalformedRowError("the message that it answers is not listed before it")
    if any(row["removed"] for row in thread):
        raise SkippedRowError("a message of the thread was removed")
    sound = (row for row in answers if row["rank"] is not None and not row["removed"])
    ranked = sorted((row["rank"], row["text"]) for row in sound)
    if len(ranked) < 2:
        raise SkippedRowError("fewer than two ranked answers")
    (best, chosen), (worst, rejected) = ranked[0], ranked[-1]
    prompt = messages([{"role": row["role"], "content": row["text"]} for row in thread], "text")
    return preferred(prompt, (chosen, rejected), (-best, -worst))


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
    Source("OpenAssistant/oasst1", "comparisons", columns=_COLUMNS, assemble=_trees),
    Source(
        "nvidia/HelpSteer2", "comparisons", columns=("prompt", "response", _SCORE),
        assemble=_pairs,
    ),
    Source(
        "Salesforce/wikitext", "text", columns=("text",), assemble=_articles,
        subset="wikitext-103-raw-v1",
    ),
)  # fmt: skip
