"""OpenAssistant Conversations: trees of messages, in which people rank the answers to one message.

Köpf et al. 2023, "OpenAssistant Conversations - Democratizing Large Language Model Alignment". A
row is a message; rank 0 is the best. The published file lists the messages of a tree consecutively,
each after the message that it answers. So one tree at a time is in memory; other orders are
rejected.
"""

from collections import defaultdict
from dataclasses import dataclass

from rlhf_pipeline.data.records import Example, Message, Unused
from rlhf_pipeline.data.sources.adapter import (
    MalformedRowError,
    Records,
    Row,
    Rows,
    SkippedRowError,
    Source,
    field,
    outcome,
    preferred,
    text,
)
from rlhf_pipeline.errors import DataError

_COLUMNS = (
    "message_id",
    "parent_id",
    "message_tree_id",
    "role",
    "text",
    "rank",
    "deleted",
    "review_result",
)


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


def assemble(rows: Rows) -> Records:
    """Compare the best with the worst answer to each user message with two or more ranked answers.

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


SOURCES = (
    Source(
        name="OpenAssistant/oasst1",
        kind="comparisons",
        description="dialogues in 35 languages written and ranked by volunteers, the best answer "
        "against the worst",
        columns=_COLUMNS,
        assemble=assemble,
    ),
)
