"""A base model with code of its own, through every stage by the command line: with the user's word for it, and without."""

import json
import shutil

import pytest
from model_with_code import bring_code

pytestmark = pytest.mark.long


def test_it_is_executed_where_the_user_says_so_and_goes_with_the_models(project, tmp_path):
    base, marker = tmp_path / "base", tmp_path / "executed"
    shutil.copytree(project.newest("02_base_model/base_model"), base)
    bring_code(base, marker)
    mine = type(project)(tmp_path)
    params = f"base_model.path={base},base_model.architecture=null,base_model.vocab_size=null"

    refused = mine.kedro("--pipeline=full", params=params, check=False)
    assert (
        f"{base} brings Python code of its own" in refused
        and "base_model.trust_remote_code" in refused
    )
    assert not marker.exists()

    mine.kedro("--pipeline=full", params=params + ",base_model.trust_remote_code=true")
    assert marker.exists()
    for stage in ("sft", "reward", "ppo"):
        model = mine.newest(f"06_models/{stage}_model")
        assert (model / "modeling_own.py").is_file()
        assert json.loads((model / "config.json").read_text())["model_type"] == "own"
