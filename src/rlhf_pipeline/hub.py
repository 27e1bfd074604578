"""Which commit of a repository on the Hugging Face hub a branch or tag names now: a recipe holds that, not the name."""

from __future__ import annotations

import re
from typing import Literal

_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(revision: str | None) -> bool:
    """Whether a revision names the same content for all time."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def commit_of(kind: Literal["dataset", "model"], repository: str, revision: str | None) -> str:
    """The commit that `revision` names, None the newest of the default branch. A commit is returned as it is, unasked.

    Raises:
        LookupError: the hub cannot be reached, or has no such repository or revision.
    """
    if revision is not None and is_commit(revision):
        return revision
    from huggingface_hub import HfApi

    ask = HfApi().dataset_info if kind == "dataset" else HfApi().model_info
    try:
        return str(ask(repository, revision=revision).sha)
    except Exception as error:  # the HTTP library's own, for lost connections, have no base in common with the hub's
        raise LookupError(
            f"the hub does not tell which commit {revision or 'the newest'} of {repository!r} is: {error}"
        ) from error
