"""Imports of libraries without what they would import and nobody needs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Let imports of libraries fail in the block, unless they have been imported already.

    After the block they can be imported. What a library has found absent stays so for it.
    """
    absent = [name for name in names if vars(sys)["modules"].setdefault(name) is None]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
