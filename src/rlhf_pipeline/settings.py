"""Kedro's settings for this project."""

import atexit
import gc
import os
import warnings

from omegaconf.resolvers import oc
from rich.console import Console

from rlhf_pipeline.hooks import ErrorHook, PreflightHook, ResultsHook, StagesHook

# Imports create many objects and no garbage. Garbage collection took a sixth of a cached run
# during the imports, and a fifth at the end of the interpreter.
gc.set_threshold(100_000, 20, 100)
atexit.register(gc.freeze)
os.environ.setdefault("DO_NOT_TRACK", "true")
warnings.filterwarnings("ignore", message="register_new_resolver", category=UserWarning)

_CONSOLE = Console()
HOOKS = (ErrorHook(), PreflightHook(), StagesHook(_CONSOLE), ResultsHook(_CONSOLE))
DISABLE_HOOKS_FOR_PLUGINS = ("kedro-viz",)
# Without the soft merge, overriding one key of a block would drop the other keys.
CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    "merge_strategy": {"parameters": "soft"},
    "custom_resolvers": {"oc.env": oc.env},  # parameters may refer to environment variables
}
