"""DeepSpeed, imported without what it and transformers import and no program uses.

The autotuner imports MLflow if that is installed, which takes each rank a second and 90 MB. Muon
compiles three functions, and transformers up to 5.20 excludes one of its continuous batching from
compilation: both load the compiler, which takes two seconds. The package imports DeepSpeed from
here only.
"""

import sys
from unittest.mock import patch

import torch

_without_mlflow = "mlflow" not in sys.modules
if _without_mlflow:
    vars(sys)["modules"]["mlflow"] = None  # an import of it fails, which the autotuner allows for
try:
    with (
        patch.object(torch, "compile", lambda function: function),
        patch.object(torch.compiler, "disable", lambda function: function),
    ):
        import deepspeed
        import deepspeed.runtime.zero.muon.muon_optimizer
        import transformers.generation  # noqa: F401
finally:
    if _without_mlflow:
        del sys.modules["mlflow"]

from deepspeed import DeepSpeedEngine  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation  # noqa: E402

__all__ = ["DeepSpeedEngine", "deepspeed", "get_accelerator", "unwrap_model_for_generation"]
