"""Kedro's settings for this project."""

import atexit
import gc
import os
import warnings

from omegaconf.resolvers import oc
from rich.console import Console

from rlhf_pipeline.hooks import ErrorHook, PreflightHook, ResultsHook, StagesHook

gc.set_threshold(
    100_000, 20, 100
)  # imports make objects and no garbage: looking for it cost a sixth of a run
atexit.register(
    gc.freeze
)  # and the interpreter would look through them all again at its end: a fifth of a cached run
os.environ.setdefault("DO_NOT_TRACK", "true")
warnings.filterwarnings("ignore", message="register_new_resolver", category=UserWarning)

_CONSOLE = Console()
HOOKS = (ErrorHook(), PreflightHook(), StagesHook(_CONSOLE), ResultsHook(_CONSOLE))
DISABLE_HOOKS_FOR_PLUGINS = ("kedro-viz",)
# Without the soft merge an environment that overrides one key of a block would drop the rest of the block.
CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    "merge_strategy": {"parameters": "soft"},
    "custom_resolvers": {"oc.env": oc.env},  # parameters may name a file by an environment variable
}
