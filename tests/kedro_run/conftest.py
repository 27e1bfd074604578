"""The parameters of the project, and changes of them."""

import copy
from pathlib import Path

import pytest

from rlhf_pipeline.kedro_run.config_loader import LayeredConfigLoader
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture
def parameters():
    return LayeredConfigLoader(str(CONF), env="base", **CONFIG_LOADER_ARGS)["parameters"]


@pytest.fixture
def changed(parameters):
    """A copy of the parameters with other values, by place."""

    def changed(values, given=None):
        found = copy.deepcopy(parameters if given is None else given)
        for place, value in values.items():
            *path, last = place.split(".")
            target = found
            for name in path:
                target = target.setdefault(name, {})
            target[last] = value
        return found

    return changed
