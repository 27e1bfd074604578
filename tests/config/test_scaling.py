"""The examples of docs/scaling.md are valid with the default parameters."""

import re
from pathlib import Path

import pytest
import yaml

from rlhf_pipeline.kedro_run.checks import check
from rlhf_pipeline.kedro_run.config_loader import LayeredConfigLoader
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS

PROJECT = Path(__file__).parents[2]
EXAMPLES = re.findall(
    r"```yaml\n(.*?)```", (PROJECT / "docs" / "scaling.md").read_text(), flags=re.DOTALL
)


def merged(base, changes):
    if not isinstance(base, dict) or not isinstance(changes, dict):
        return changes
    return base | {key: merged(base.get(key), value) for key, value in changes.items()}


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example(example):
    loader = LayeredConfigLoader(str(PROJECT / "conf"), env="base", **CONFIG_LOADER_ARGS)
    parameters = loader["parameters"]
    check(merged(parameters, yaml.safe_load(example)), gpus=8)
