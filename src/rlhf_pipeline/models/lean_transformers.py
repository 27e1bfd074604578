"""Model classes of transformers, imported in a quarter less of a core's time than by themselves.

Garbage is collected neither in the import nor among its objects. No program needs boto3, SciPy, or
scikit-learn here, or the files of all distributions, which tell apart versions of flash attention.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata, util
from unittest.mock import patch


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Let imports of libraries fail in the block, unless they have been imported already."""
    absent = [name for name in names if vars(sys)["modules"].setdefault(name) is None]
    yield
    for name in absent:
        del sys.modules[name]


gc.disable()
flash = util.find_spec("flash_attn") or util.find_spec("flash_attn_interface")
scan = metadata.packages_distributions if flash else dict
scipy = () if "transformers" in sys.modules else ("scipy",)  # else it may be known to be installed
with hidden("boto3", "sklearn", *scipy), patch("importlib.metadata.packages_distributions", scan):
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
gc.freeze()
gc.enable()
