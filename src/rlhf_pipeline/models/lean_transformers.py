"""Model classes of transformers, imported without what they import and no program uses.

Up to version 5.20, they import scikit-learn for assisted generation, with pandas and pyarrow, and
load torch's compiler only to exclude continuous batching from it. That takes each rank seconds.
Every module imports model classes from here, so that the first import is always this one.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Let imports of a library fail in the block, unless it has been imported already."""
    hides = name not in sys.modules
    if hides:
        vars(sys)["modules"][name] = None
    try:
        yield
    finally:
        if hides:
            del sys.modules[name]


def _unchanged(function: Any = None, **options: Any) -> Any:
    """A decorator, with options or without, that does nothing."""
    return _unchanged if function is None else function


with hidden("sklearn"), patch.object(torch.compiler, "disable", _unchanged):
    from transformers import (  # noqa: F401
        AttentionInterface,
        AttentionMaskInterface,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        Cache,
        DynamicCache,
        GenerationConfig,
        PreTrainedModel,
    )
