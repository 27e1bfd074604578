"""Kedro's settings: those of rlhf-pipeline. Add hooks of your own to `HOOKS`."""

from rlhf_pipeline.settings import CONFIG_LOADER_ARGS as CONFIG_LOADER_ARGS
from rlhf_pipeline.settings import CONFIG_LOADER_CLASS as CONFIG_LOADER_CLASS
from rlhf_pipeline.settings import DISABLE_HOOKS_FOR_PLUGINS as DISABLE_HOOKS_FOR_PLUGINS
from rlhf_pipeline.settings import HOOKS as HOOKS
