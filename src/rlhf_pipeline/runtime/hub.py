"""Commits and licences on the Hugging Face hub.

Recipes contain a commit, and not a branch or tag that may move.
"""

import re
from typing import Any, Literal

from rlhf_pipeline.errors import without_secrets

Kind = Literal["dataset", "model"]
UNKNOWN = "unknown"
"""The licence of what states none."""


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a commit, whose content never changes."""
    return re.fullmatch("[0-9a-f]{40}", revision or "") is not None


def commit_of(kind: Kind, repository: str, revision: str | None) -> str:
    """The commit of a revision; without a revision, the newest one of the default branch.

    The hub is not contacted if `revision` is a commit. Raises LookupError if the hub cannot be
    reached, or has no such repository or revision.
    """
    if revision is not None and is_commit(revision):
        return revision
    try:
        return str(_info(kind, repository, revision).sha)
    except Exception as error:  # the hub and the HTTP library have no common base class
        raise LookupError(
            f"the hub did not return the commit of {repository!r} "
            f"at {revision or 'its default branch'}: {without_secrets(str(error))}"
        ) from error


def license_of(kind: Kind, repository: str, revision: str | None) -> str:
    """The licence that a repository states; "unknown" if it states none or cannot be reached."""
    try:
        return getattr(_info(kind, repository, revision).card_data, "license", None) or UNKNOWN
    except Exception:  # see `commit_of`
        return UNKNOWN


def _info(kind: Kind, repository: str, revision: str | None) -> Any:
    from huggingface_hub import HfApi

    ask = HfApi().dataset_info if kind == "dataset" else HfApi().model_info
    return ask(repository, revision=revision)
