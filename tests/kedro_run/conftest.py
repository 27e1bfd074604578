"""The parameters of the project, changes of them, and the catalog of a command."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project

from rlhf_pipeline.kedro_run.config_loader import LayeredConfigLoader
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS
from rlhf_pipeline.sizing import fit

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def loader():
    return LayeredConfigLoader(str(PROJECT / "conf"), env="base", **CONFIG_LOADER_ARGS)


@pytest.fixture
def parameters(loader):
    return loader["parameters"]


@pytest.fixture
def load_catalog():
    """Loads the configuration, as all commands do, and returns the catalog."""
    with ExitStack() as sessions:

        def load_catalog(params, env="tiny", conf=None):
            bootstrap_project(PROJECT)
            session = KedroSession.create(PROJECT, env=env, conf_source=conf, runtime_params=params)
            return sessions.enter_context(session).load_context().catalog

        yield load_catalog


@pytest.fixture
def changed(parameters):
    """A copy of the parameters with other values, by place."""
    return lambda values, given=None: fit.changed(given or parameters, values)
