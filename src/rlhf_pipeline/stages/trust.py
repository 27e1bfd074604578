"""Whether code that lies beside a model's weights may be executed: only where `base_model.trust_remote_code` says so.

A launched program learns it from its job. It cannot be read off the model: whoever made that could have written it there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_trusted = [False]


@contextmanager
def trusting(trusted: bool) -> Iterator[None]:
    """Inside the block models' own code is executed, or not."""
    _trusted.append(trusted)
    try:
        yield
    finally:
        _trusted.pop()


def trusts_remote_code() -> bool:
    """Whether the user has said so."""
    return _trusted[-1]
