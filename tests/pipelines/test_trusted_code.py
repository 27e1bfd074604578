"""A base model that ships Python code, in every stage by the command line, trusted and not."""

import json
import shutil

import pytest
from model_with_code import bring_code

pytestmark = pytest.mark.long


def test_code_is_executed_only_if_trusted_and_exported_with_the_models(project, tmp_path):
    base, marker = tmp_path / "base", tmp_path / "executed"
    shutil.copytree(project.newest("02_base_model/base_model"), base)
    bring_code(base, marker)
    mine = type(project)(tmp_path)
    params = (
        f"base_model.path={base},base_model.architecture=null,base_model.vocab_size=null,"
        "split.max_prompt_tokens=64,split.max_response_tokens=48,"
        "evaluate.sampling.max_response_tokens=12"
    )

    refused = mine.kedro("--pipeline=full", params=params, check=False)
    assert (
        f"{base}: the model needs its own Python code" in refused
        and "set base_model.trust_remote_code to true" in refused
    )
    assert not marker.exists()

    mine.kedro("--pipeline=full", params=params + ",base_model.trust_remote_code=true")
    assert marker.exists()
    for stage in ("sft", "reward", "ppo"):
        model = mine.newest(f"06_models/{stage}_model")
        assert (model / "modeling_own.py").is_file()
        assert json.loads((model / "config.json").read_text())["model_type"] == "own"
