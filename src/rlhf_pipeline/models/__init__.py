"""Model classes of transformers, imported in a quarter less of a core's time than by themselves.

Garbage is collected neither during the import nor among its objects. No program here needs boto3,
scikit-learn and SciPy; they are left out, SciPy only if transformers cannot have found it before.
All modules import model classes from here.
"""

import gc
import sys

from rlhf_pipeline.runtime.imports import hidden

gc.disable()
with hidden("boto3", "sklearn", *([] if "transformers" in vars(sys)["modules"] else ["scipy"])):
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
