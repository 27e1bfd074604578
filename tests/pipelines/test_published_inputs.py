"""Starting from the results of other parameters: refused with the changes, or on record.

`kedro_run/test_published_inputs.py` shows which changes count.
"""

import json
import re
import shutil

import pytest

pytestmark = pytest.mark.slow


def test_inputs_of_other_parameters_are_refused(project):
    runs, params = len(project.runs()), "sft.optimizer.learning_rate=0.01"
    printed = project.kedro("--nodes=ppo", params=params, check=False)
    assert "the published inputs were made with other parameters (theirs -> yours):" in printed
    assert "  reward_model, sft_model: sft.optimizer.learning_rate 0.003 -> 0.01" in printed
    assert "Fix: `kedro run --pipeline=full --env=tiny --params=" in printed
    assert params in printed and "--params=inputs=newest" in printed
    assert len(printed.splitlines()) <= 5
    assert len(project.runs()) == runs


def test_a_mixture_is_on_record_when_it_is_accepted(project):
    project.kedro("--nodes=ppo", params="sft.epochs=2,ppo.steps=1,inputs=newest")
    manifest = json.loads((project.newest("06_models/ppo_model") / "manifest.json").read_text())
    assert manifest["mixture"] == {
        name: ["sft.epochs 1.0 -> 2.0"] for name in ("reward_model", "sft_model")
    }
    tagged = [run for run in project.runs() if "rlhf.mixture" in run.data.tags]
    names = {run.info.run_name.partition(" sft.epochs")[0].partition(" ")[0] for run in tagged}
    assert names == {"ppo"} and len(tagged) == 2
    assert tagged[0].data.tags["rlhf.mixture"].startswith("reward_model: sft.epochs 1.0 -> 2.0")


def test_another_data_file_is_refused(project, new_project, tmp_path, monkeypatch):
    """Its path is no part of the recipe, but its bytes are."""
    own, model = new_project(tmp_path / "root"), tmp_path / "model"
    shutil.copytree(project.newest("02_base_model/base_model"), model)
    params = f"base_model.path={model},split.max_prompt_tokens=64,split.max_response_tokens=48"

    def set_file(name, verb):
        turn = "\n\nHuman: please {verb} number {i}\n\nAssistant: {answer} {i}"
        rows = (
            {kind: turn.format(verb=verb, i=i, answer=kind) for kind in ("chosen", "rejected")}
            for i in range(200)
        )
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        monkeypatch.setenv("HH_RLHF_PATH", str(tmp_path / name))

    set_file("one.jsonl", "count")
    own.kedro("--to-nodes=split", env="hh-rlhf", params=params)
    set_file("two.jsonl", "name")
    printed = own.kedro("--nodes=sft", env="hh-rlhf", params=params, check=False)
    assert "the published inputs were made with other parameters" in printed
    assert re.search(r"source Anthropic/hh-rlhf \S+two\.jsonl .*is new", printed)
