"""Mistakes at the command line and in YAML: one message of at most five lines, without a stack,
that names the place and the fix. What each check says is tested where the check is."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from kedro.framework.project import pipelines
from processes import kedro

from rlhf_pipeline.commands.status import examine, planned_rows, run
from rlhf_pipeline.kedro_run.explain import explain
from rlhf_pipeline.kedro_run.hooks import CheckHook

PROJECT = Path(__file__).parents[2]
HIDDEN_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9"}

MISTAKES = {
    "unknown parameter": (
        {"params": {"ppo": {"kl": {"coeff": 0.2}}}},
        ["ppo.kl.coeff (--params): unknown parameter (did you mean coef?)"],
    ),
    "unknown parameter in a file": (
        {"yaml": "sft: {epoch: 2}"},
        ["sft.epoch (", "conf/mistake/parameters.yml): unknown parameter (did you mean epochs?)"],
    ),
    "unknown environment": ({"env": "tinny"}, ["--env: found 'tinny' (did you mean tiny?)"]),
    "YAML with an open bracket": (
        {"yaml": "ppo:\n  kl: [1, 2\nsft:\n  epochs: 1"},
        ["conf/mistake/parameters.yml, line 3, column 4", "sft:", "Fix: correct this line"],
    ),
    "YAML that is a list": (
        {"yaml": "- ppo"},
        ["conf/mistake/parameters.yml: found a list, expected parameters by name"],
    ),
    "unset environment variable": (
        {"yaml": "ppo: {steps: '${oc.env:NO_SUCH_VARIABLE}'}"},
        ["ppo.steps: ", "Environment variable 'NO_SUCH_VARIABLE' not found"],
    ),
    "root that is a file": (
        {"params": {"root": "{tmp}/empty.jsonl/data"}},
        ["root: found '{tmp}/empty.jsonl/data', but {tmp}/empty.jsonl is a file", "--params=root="],
    ),
    "missing model folder": (
        {"params": {"base_model": {"path": "/no/such/model"}}},
        ["base_model.path (--params): found no folder '/no/such/model'. Fix: check the spelling"],
    ),
}  # fmt: skip
"""Parameters, and what their message must contain."""

ALONE = "evaluate: {judges: [{regex: x}]}\nsft: null\nreward_model: null\nppo: null\n"
"""A policy without SFT, reward model and PPO, and a judge."""
BY_REWARD = (
    f"{ALONE}grpo: {{sampling: {{max_response_tokens: 64}}, rewards: ['{{tmp}}/rewards.py:kw']}}\n"
)

IN_SECONDS = {
    "empty file": (
        "dpo", "empty", ALONE,
        "split.sources.0: {tmp}/empty.jsonl: the file contains no rows. Fix: download or create",
    ),
    "a reward that cannot be called": (
        "grpo", "prompts", BY_REWARD,
        "grpo.rewards.0: {tmp}/rewards.py:kw cannot be called with (prompts, responses): too many ",
    ),
}  # fmt: skip
"""What is found before the first stage, but not before the catalog exists: pipeline, file of the
source, parameters, message."""

COMMANDS = {
    "hub that is unreachable": (
        "run --params=root={tmp}/data,base_model.path=nobody/nothing",
        ["base_model.path: the hub did not return the commit of 'nobody/nothing'", "Fix: check"],
    ),
    "unknown node, and the file is missing": (
        "run --env=mistake --conf-source={tmp}/conf --from-nodes=pppo",
        ["--from-nodes: found 'pppo' (did you mean ppo?)"],
    ),
}
"""A command, and what it must print."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    shutil.copytree(PROJECT / "conf", folder / "conf")
    (folder / "rewards.py").write_text("def kw(*, prompts, responses): ...\n")
    rows = [json.dumps({"prompt": f"Is it number {n}?"}) for n in range(40)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    (folder / "empty.jsonl").touch()
    (folder / "conf" / "mistake").mkdir()
    (folder / "conf" / "mistake" / "globals.yml").write_text(f"root: {folder}/data\n")
    return folder


@pytest.fixture
def filled(folder):
    """Text with the folder, and parameters as the file of the environment `mistake`."""

    def filled(text, *, is_file=False):
        text = text.replace("{tmp}", str(folder))
        if is_file:
            (folder / "conf" / "mistake" / "parameters.yml").write_text(f"{text}\n")
        return text

    return filled


@pytest.fixture
def catalog(load_catalog, folder):
    """Loads the configuration of the folder."""

    def catalog(env="mistake", **params):
        return load_catalog(params, env, str(folder / "conf"))

    return catalog


def refused(check, *given, **options) -> str:
    with pytest.raises(Exception) as failure:
        check(*given, **options)
    message = explain(failure.value).format_message()
    assert len(message.splitlines()) <= 5, message
    return message


@pytest.mark.parametrize(("given", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_short_message_with_place_and_fix(given, expected, filled, catalog):
    filled(given.get("yaml", "{}"), is_file=True)
    params = json.loads(filled(json.dumps(given.get("params", {}))))
    message = refused(catalog, env=given.get("env", "mistake"), **params)
    for part in expected:
        assert filled(part) in message


@pytest.mark.parametrize(
    ("pipeline", "file", "text", "expected"), IN_SECONDS.values(), ids=IN_SECONDS
)
def test_run_status_and_doctor_refuse_it_before_the_first_stage(
    pipeline, file, text, expected, filled, catalog
):
    sources = f"split: {{sources: [{{name: files, path: '{{tmp}}/{file}.jsonl'}}]}}\n"
    filled(sources + text, is_file=True)
    given = pipelines[pipeline], catalog()
    message = refused(CheckHook().before_pipeline_run, {}, *given)
    assert filled(expected) in message
    assert refused(planned_rows, *given) == message
    found = examine(partial(run, *given))
    assert found.state == "failure"
    assert f"{found.found} Fix: {found.fix}" == message.replace("\nFix: ", " Fix: ")


def test_results_that_nothing_has_made_yet_are_named_with_the_run_that_makes_them(filled, catalog):
    filled("{}", is_file=True)
    nodes = pipelines["full"].from_nodes("ppo")
    message = refused(CheckHook().before_pipeline_run, {}, nodes, catalog())
    assert "no version of reward_model, sft_model, split is published" in message
    assert "--pipeline=full" in message


@pytest.mark.slow
@pytest.mark.parametrize(("command", "expected"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_prints_the_message_without_a_stack(command, expected, folder, filled):
    filled("{}", is_file=True)
    variables = {"PYTHONPATH": str(PROJECT / "src"), **HIDDEN_HUB}
    variables["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/ml.db"
    result = kedro(*filled(command).split(), folder=PROJECT, **variables)
    printed = result.stdout + result.stderr
    assert result.returncode not in (0, 130), printed
    assert "Traceback" not in printed and 'File "' not in printed, printed
    assert len(printed[printed.rindex("Error: ") :].splitlines()) <= 5, printed
    for part in expected:
        assert filled(part) in printed, printed
