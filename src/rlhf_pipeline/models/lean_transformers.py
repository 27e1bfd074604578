"""Model classes of transformers, imported without scikit-learn.

Up to version 5.20, they import it for assisted generation, with pandas and pyarrow. That takes each
rank 0.7 seconds of a core. Every module imports model classes from here, so that the first import
is always this one.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


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


with hidden("sklearn"):
    from transformers import (  # noqa: F401
        AttentionInterface,
        AttentionMaskInterface,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        Cache,
        GenerationConfig,
        PreTrainedModel,
    )
