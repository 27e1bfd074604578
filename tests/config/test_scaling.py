"""The examples of docs/scaling.md are valid with the default parameters."""

import re
from pathlib import Path

import pytest
import yaml

from rlhf_pipeline.preflight import preflight

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
    parameters = {}
    for path in sorted((PROJECT / "conf" / "base").glob("parameters*.yml")):
        parameters |= yaml.safe_load(path.read_text())
    preflight(merged(parameters, yaml.safe_load(example)), gpus=8)
