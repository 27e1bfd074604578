"""Model classes of transformers, imported without scikit-learn.

Up to version 5.20, they import it for assisted generation, with pandas and pyarrow, which takes
each rank 0.7 seconds of a core. All modules import model classes from here.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Let imports of a library fail in the block, unless it has been imported already."""
    found = vars(sys)["modules"].setdefault(name, None)
    try:
        yield
    finally:
        if found is None:
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
