import atexit
import gc
import os
import warnings

from kedro.io import memory_dataset
from omegaconf.resolvers import oc
from rich.console import Console

from rlhf_pipeline.kedro_run.config_loader import LayeredConfigLoader
from rlhf_pipeline.kedro_run.hooks import CheckHook, RecordHook, RunHook

# Imports create many objects and no garbage. Garbage collection took a sixth of a cached run
# during the imports, and a fifth at the end of the interpreter.
gc.set_threshold(500_000, 20, 100)
atexit.register(gc.freeze)
os.environ.setdefault("DO_NOT_TRACK", "true")
warnings.filterwarnings("ignore", message="register_new_resolver", category=UserWarning)


ask_kedro = vars(memory_dataset).get("_infer_copy_mode", lambda value: "deepcopy")


def copy_mode(value: object) -> str:
    """How Kedro copies a value, without the import of pandas to ask if a parameter is a table."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    is_table = libraries & {"ibis", "numpy", "pandas"} or type(value).__name__ == "DataFrame"
    return ask_kedro(value) if is_table else "deepcopy"


memory_dataset._infer_copy_mode = copy_mode

CHECK = CheckHook()
RECORD = RecordHook(CHECK)
HOOKS = (CHECK, RunHook(CHECK, RECORD, Console()), RECORD)  # Kedro calls the last one first
DISABLE_HOOKS_FOR_PLUGINS = ("kedro-viz",)
CONFIG_LOADER_CLASS = LayeredConfigLoader
CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    "custom_resolvers": {"oc.env": oc.env},  # parameters may refer to environment variables
}
