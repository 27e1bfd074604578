"""Data sets of which several rows make a record: ratings, trees of messages, lines of articles."""

import re
from collections import defaultdict
from dataclasses import dataclass

from rlhf_pipeline.data.records import Example, Message, Text, Unused
from rlhf_pipeline.data.sources.adapter import (
    MalformedRowError,
    Records,
    Row,
    Rows,
    SkippedRowError,
    Source,
    field,
    number,
    outcome,
    preferred,
    text,
    turns,
)
from rlhf_pipeline.errors import DataError

_TURN = re.compile(r"<extra_id_1>(User|Assistant)\n")
_TITLE = re.compile(r" = [^=].* = ?")
_COLUMNS = (
    "message_id", "parent_id", "message_tree_id", "role", "text", "rank", "deleted",
    "review_result",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Answer:
    place: str
    prompt: str
    response: str
    helpfulness: float


@dataclass(frozen=True, slots=True)
class _Node:
    place: str
    id: str
    parent: str | None
    tree: str
    message: Message
    rank: int | None
    removed: bool
    """Deleted, or rejected by its reviewers."""


def _pairs(rows: Rows) -> Records:
    """HelpSteer2: choose the more helpful answer of each pair of rows; ties are skipped.

    Wang et al. 2024, "HelpSteer2: Open-source dataset for training top-performing reward models".
    People rated answers from 0 to 4. The two answers to a prompt are consecutive rows. A prompt of
    several turns has the form
    "{user}\\n<extra_id_1>Assistant\\n{answer}\\n<extra_id_1>User\\n{user}".
    """
    first: _Answer | None = None
    for place, row in rows:
        answer = outcome(_answer, place, row)
        if isinstance(answer, Unused):
            yield place, answer
        elif first is None:
            first = answer
        elif first.prompt == answer.prompt:
            yield first.place, outcome(_compared, first, answer)
            first = None
        else:
            yield first.place, Unused("the next row answers another prompt")
            first = answer
    if first is not None:  # `samples` ended between the two rows
        yield first.place, Unused("no row follows", bad=False)


def _answer(place: str, row: Row) -> _Answer:
    return _Answer(place, text(row, "prompt"), text(row, "response"), number(row, "helpfulness"))


def _compared(first: _Answer, second: _Answer) -> Example:
    opening, later = turns(first.prompt, _TURN)
    return preferred(
        (Message("user", opening), *later),
        (first.response, second.response),
        (first.helpfulness, second.helpfulness),
    )


def _trees(rows: Rows) -> Records:
    """OpenAssistant: compare the best with the worst of two or more ranked answers to a message.

    Köpf et al. 2023, "OpenAssistant Conversations - Democratizing Large Language Model Alignment".
    A row is a message; rank 0 is the best. The published file lists the messages of a tree
    consecutively, each after the message that it answers. So one tree at a time is in memory.
    Raises DataError if the messages of a tree are not consecutive.
    """
    tree: list[_Node] = []
    finished: set[str] = set()
    for place, row in rows:
        node = outcome(_node, place, row)
        if isinstance(node, Unused):
            yield place, node
            continue
        if tree and node.tree != tree[0].tree:
            yield from _comparisons(tree)
            finished.add(tree[0].tree)
            tree = []
        if node.tree in finished:
            raise DataError(
                f"{place}: found tree {node.tree} again, expected all messages of a tree in "
                "consecutive rows. Fix: sort the rows by message_tree_id."
            )
        tree.append(node)
    yield from _comparisons(tree)


def _node(place: str, row: Row) -> _Node:
    for column in _COLUMNS:
        field(row, column, object)
    role = text(row, "role")
    if role not in ("prompter", "assistant"):
        raise MalformedRowError("column 'role' is neither prompter nor assistant")
    return _Node(
        place,
        id=text(row, "message_id"),
        parent=None if row["parent_id"] is None else text(row, "parent_id"),
        tree=text(row, "message_tree_id"),
        message=Message("user" if role == "prompter" else "assistant", text(row, "text")),
        rank=None if row["rank"] is None else field(row, "rank", int),
        removed=bool(row["deleted"]) or row["review_result"] is False,
    )


def _comparisons(tree: list[_Node]) -> Records:
    """Yield one result for each user message of the tree."""
    answers: dict[str | None, list[_Node]] = defaultdict(list)
    for node in tree:
        if node.message.role == "assistant":
            answers[node.parent].append(node)
    threads: dict[str, tuple[_Node, ...] | None] = {}
    for node in tree:
        before = () if node.parent is None else threads.get(node.parent)
        thread = threads[node.id] = None if before is None else (*before, node)
        if node.message.role == "user":
            yield node.place, outcome(_comparison, thread, answers[node.id])


def _comparison(thread: tuple[_Node, ...] | None, answers: list[_Node]) -> Example:
    if thread is None:
        raise MalformedRowError("the message that it answers is not listed before it")
    if any(node.removed for node in thread):
        raise SkippedRowError("a message of the thread was removed")
    ranked = [
        (node.rank, node.message.content)
        for node in answers
        if node.rank is not None and not node.removed
    ]
    if len(ranked) < 2:
        raise SkippedRowError("fewer than two ranked answers")
    (best, chosen), (worst, rejected) = min(ranked), max(ranked)
    return preferred(tuple(node.message for node in thread), (chosen, rejected), (-best, -worst))


def _articles(rows: Rows) -> Records:
    """WikiText: yield each article as one text, without blank lines.

    Merity et al. 2016, "Pointer Sentinel Mixture Models". A row is a line: a paragraph, an empty
    line, or a heading with one equals sign per level on each side. So " = Title = " begins an
    article.
    """
    start, article = "", list[str]()
    for place, row in rows:
        lines = outcome(_lines, row)
        if isinstance(lines, Unused):
            yield place, lines
            continue
        for line in lines:
            if article and _TITLE.fullmatch(line):
                yield start, Text("\n".join(article))
                article = []
            start = start if article else place
            article.append(line.strip())
    if article:
        yield start, Text("\n".join(article))


def _lines(row: Row) -> list[str]:
    """The lines of a row: one on the hub, many in a text file."""
    return [line for line in text(row, "text").split("\n") if line.strip()]


SOURCES = (
    Source(
        "OpenAssistant/oasst1", "comparisons",
        "dialogues in 35 languages written and ranked by volunteers, the best answer against the "
        "worst",
        _COLUMNS, assemble=_trees,
    ),
    Source(
        "nvidia/HelpSteer2", "comparisons",
        "answers of models rated by people for helpfulness, about 10,000 comparisons with ties",
        ("prompt", "response", "helpfulness"), assemble=_pairs,
    ),
    Source(
        "Salesforce/wikitext", "text",
        "English Wikipedia's good and featured articles, about 28,000",
        ("text",), assemble=_articles, subset="wikitext-103-raw-v1",
    ),
)  # fmt: skip
