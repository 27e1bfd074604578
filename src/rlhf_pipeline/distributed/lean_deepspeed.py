"""DeepSpeed, imported without two things that it imports and that no program uses.

Its autotuner imports MLflow, which takes each rank a second and 90 MB. Its Muon compiles three
functions, and loading the compiler takes two seconds. All modules import DeepSpeed from here.
"""

from contextlib import suppress
from unittest.mock import patch

import torch

from rlhf_pipeline.models.lean_transformers import hidden

with hidden("mlflow"), patch.object(torch, "compile", lambda function: function):
    import deepspeed

    with suppress(ImportError):  # it is elsewhere in another version
        import deepspeed.runtime.zero.muon.muon_optimizer

from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

__all__ = ["DeepSpeedEngine", "deepspeed", "get_accelerator", "unwrap_model_for_generation"]
