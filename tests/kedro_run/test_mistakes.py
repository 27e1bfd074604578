"""Mistakes at the command line and in YAML: one message of at most five lines, without a stack,
that names the place and the fix."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from kedro.framework.project import pipelines
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project

from rlhf_pipeline.commands.status import examine, planned_rows, run
from rlhf_pipeline.kedro_run.explain import explain
from rlhf_pipeline.kedro_run.hooks import CheckHook

PROJECT = Path(__file__).parents[2]
CSV = "prompt,better,worse\n" + "".join(f"hello {i},a good {i},a bad {i}\n" for i in range(40))
HIDDEN_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9"}


@dataclass
class Mistake:
    """Parameters, and what their message must contain."""

    expected: list[str]
    params: str = ""
    yaml: str = ""
    """Text of conf/mistake/parameters.yml."""
    env: str = "mistake"
    pipeline: str = "full"


def sources(fields: str) -> str:
    return f"split: {{sources: [{{{fields}}}]}}\n"


MISTAKES = {
    "unknown nested parameter": Mistake(
        ["ppo.kl.coeff (--params): unknown parameter (did you mean coef?)"],
        params="ppo.kl.coeff=0.2",
    ),
    "unknown nested parameter in a file": Mistake(
        ["sft.epoch (", "conf/mistake/parameters.yml): unknown parameter (did you mean epochs?)"],
        yaml="sft: {epoch: 2}\n",
    ),
    "negative learning rate": Mistake(
        ["sft.optimizer.learning_rate (--params): found -1, expected more than 0"],
        params="sft.optimizer.learning_rate=-1",
    ),
    "a number in place of a block": Mistake(
        ["ppo (", "found 3, expected parameters by name"], yaml="ppo: 3\n"
    ),
    "negative seed": Mistake(
        ["seed (--params): found -1, expected a whole number >= 0"], params="seed=-1"
    ),
    "path beside architecture in one file": Mistake(
        ["base_model: found both path and architecture, expected one. Fix: set the other one"],
        yaml="base_model: {path: gpt2, architecture: {model_type: llama}}\n",
    ),
    "unknown environment": Mistake(["--env: found 'tinny' (did you mean tiny?)"], env="tinny"),
    "YAML with an open bracket": Mistake(
        ["conf/mistake/parameters.yml, line 3, column 4", "sft:", "Fix: correct this line"],
        yaml="ppo:\n  kl: [1, 2\nsft:\n  epochs: 1\n",
    ),
    "YAML with a tab": Mistake(
        ["conf/mistake/parameters.yml, line 2, column 1", "kl: 1"], yaml="ppo:\n\tkl: 1\n"
    ),
    "YAML that is a list": Mistake(
        ["conf/mistake/parameters.yml: found a list, expected parameters by name"], yaml="- ppo\n"
    ),
    "unset environment variable": Mistake(
        ["ppo.steps: ", "Environment variable 'NO_SUCH_VARIABLE' not found"],
        yaml="ppo: {steps: '${oc.env:NO_SUCH_VARIABLE}'}\n",
    ),
    "root that is a file": Mistake(
        ["root: found '{tmp}/pairs.csv/data', but {tmp}/pairs.csv is a file", "--params=root="],
        params="root={tmp}/pairs.csv/data",
    ),
    "missing model folder": Mistake(
        ["base_model.path (--params): found no folder '/no/such/model'. Fix: check the spelling"],
        params="base_model.path=/no/such/model",
    ),
    "file as a model": Mistake(
        ["base_model.path (--params): found the file '{tmp}/pairs.csv', expected a folder or an"],
        params="base_model.path={tmp}/pairs.csv",
    ),
    "model folder without a model": Mistake(
        ["base_model.path (--params): found '{tmp}', a folder without config.json"],
        params="base_model.path={tmp}",
    ),
}

ALONE = "evaluate: {judges: [{regex: x}]}\nsft: null\nreward_model: null\nppo: null\n"
"""A policy without SFT, reward model and PPO, and a judge."""


def by_reward(reward: str) -> str:
    """GRPO on prompts alone."""
    rewards = f"grpo: {{rewards: [{reward}], sampling: {{max_response_tokens: 64}}}}\n"
    return sources("name: files, path: '{tmp}/prompts.jsonl'") + ALONE + rewards


IN_SECONDS = {
    "prompt without a column": Mistake(
        [
            "set columns.prompt; the columns are 'prompt', 'better', 'worse'",
            "correct the source's `col",
        ],
        yaml=sources(
            "name: files, path: '{tmp}/pairs.csv', columns: {chosen: better, rejected: worse}"
        ),
    ),
    "empty file": Mistake(
        ["split.sources.0: {tmp}/empty.jsonl: the file contains no rows. Fix: download or create"],
        yaml=sources("name: files, path: '{tmp}/empty.jsonl'") + ALONE,
        pipeline="dpo",
    ),
    "no true answers for a reward": Mistake(
        ["grpo.rewards.0: found no true answer in the first rows of files (prompts.jsonl), "
         "expected one for each prompt, as last_number reads it. Fix: set columns.reference"],
        yaml=by_reward("{reference: last_number}"),
        pipeline="grpo",
    ),
    "a reward that cannot be called": Mistake(
        ["grpo.rewards.0: {tmp}/rewards.py:kw cannot be called with (prompts, responses): too many "
         "positional"],
        yaml=by_reward("'{tmp}/rewards.py:kw'"),
        pipeline="grpo",
    ),
    "a judge that cannot be imported": Mistake(
        ["evaluate.judges.0: {tmp}/missing.py:f cannot be imported: ModuleNotFoundError: No module "
         "named 'no_such_package'. Fix: correct it; add the folders of its modules to PYTHONPATH"],
        yaml=sources("name: files, path: '{tmp}/comparisons.jsonl'")
        + "evaluate: {judges: ['{tmp}/missing.py:f']}\n",
    ),
}  # fmt: skip
"""What is found before the first stage, but not before the catalog exists."""


COMMANDS = {
    "unknown node": (
        "run --env=tiny --from-nodes=pppo",
        ["--from-nodes: found 'pppo' (did you mean ppo?)"],
    ),
    "results that nothing has made yet": (
        "run --env=tiny --from-nodes=ppo --params=root={tmp}/data",
        ["no version of reward_model, sft_model, split is published", "--pipeline=full"],
    ),
    "hub that is unreachable": (
        "run --params=root={tmp}/data,base_model.path=nobody/nothing",
        ["base_model.path: the hub did not return the commit of 'nobody/nothing'", "Fix: check"],
    ),
    "occupied port of status": (
        "rlhf status --env=tiny --params=root={tmp}/data,launch.master_port={port}",
        ["launch.master_port", "{port}", "Fix"],
    ),
    "a phase without rows": (
        "run --env=mistake --conf-source={tmp}/conf",
        ["split.weights: found [0.0, 4.0, 4.0], with 0 for sft, expected more than 0"],
    ),
    "missing data file": ("run --env=absent --conf-source={tmp}/conf", ["{tmp}/none.csv", "Fix"]),
}
"""A command, and what it must print."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    shutil.copytree(PROJECT / "conf", folder / "conf")
    (folder / "pairs.csv").write_text(CSV)
    (folder / "rewards.py").write_text("def kw(*, prompts, responses): ...\n")
    (folder / "missing.py").write_text("import no_such_package\ndef f(prompts, responses): ...\n")
    answers = {
        "prompts": {},
        "comparisons": {"chosen": "yes", "rejected": "no"},
    }
    for name, more in answers.items():
        rows = [json.dumps({"prompt": f"Is it number {n}?"} | more) for n in range(40)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    (folder / "empty.jsonl").touch()
    for name in ("mistake", "absent"):
        (folder / "conf" / name).mkdir()
        (folder / "conf" / name / "globals.yml").write_text(f"root: {folder}/data\n")
    absent = sources(f"name: files, path: '{folder}/none.csv'")
    (folder / "conf" / "absent" / "parameters.yml").write_text(absent)
    return folder


@pytest.fixture(scope="module")
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


@pytest.fixture
def catalog(folder):
    """Loads the configuration with a mistake, as all commands do, and returns the catalog."""

    def filled(text: str) -> str:
        return text.replace("{tmp}", str(folder))

    with ExitStack() as sessions:

        def catalog(mistake):
            (folder / "conf" / "mistake" / "parameters.yml").write_text(
                filled(mistake.yaml) or "{}\n"
            )
            params: dict = {}
            for item in filter(None, [filled(mistake.params)]):
                name, _, value = item.partition("=")
                *outer, last = name.split(".")
                target = params
                for each in outer:
                    target = target.setdefault(each, {})
                target[last] = int(value) if value.lstrip("-").isdigit() else value
            bootstrap_project(PROJECT)
            session = KedroSession.create(
                PROJECT,
                env=mistake.env,
                conf_source=str(folder / "conf"),
                runtime_params=params,
            )
            return sessions.enter_context(session).load_context().catalog

        yield catalog


def is_short(message: str, mistake: Mistake, folder: Path) -> None:
    assert len(message.splitlines()) <= 5, message
    for part in mistake.expected:
        assert part.replace("{tmp}", str(folder)) in message, message


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_short_message_with_place_and_fix(mistake, folder, catalog):
    with pytest.raises(Exception) as failure:
        catalog(mistake)
    is_short(explain(failure.value).format_message(), mistake, folder)


def refused(check, *given) -> str:
    with pytest.raises(Exception) as failure:
        check(*given)
    return explain(failure.value).format_message()


@pytest.mark.parametrize("mistake", IN_SECONDS.values(), ids=IN_SECONDS)
def test_run_status_and_doctor_refuse_it_before_the_first_stage(mistake, folder, catalog):
    loaded = catalog(mistake)
    given = pipelines[mistake.pipeline], loaded
    message = refused(CheckHook().before_pipeline_run, {}, *given)
    is_short(message, mistake, folder)
    assert refused(planned_rows, *given) == message
    found = examine(partial(run, *given))
    assert found.state == "failure"
    assert f"{found.found} Fix: {found.fix}" == message.replace("\nFix: ", " Fix: ")


@pytest.mark.slow
@pytest.mark.parametrize(("command", "expected"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_prints_the_message_without_a_stack(command, expected, folder, port):
    def filled(text: str) -> str:
        return text.replace("{tmp}", str(folder)).replace("{port}", port)

    parameters = folder / "conf" / "mistake" / "parameters.yml"
    parameters.write_text("split: {weights: [0, 4, 4]}\n")
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/ml.db"}
    result = subprocess.run(
        [sys.executable, "-m", "kedro", *filled(command).split()],
        cwd=PROJECT,
        env=os.environ | {"PYTHONPATH": str(PROJECT / "src")} | store | HIDDEN_HUB,
        capture_output=True,
        text=True,
        timeout=100,
    )
    printed = result.stdout + result.stderr
    assert result.returncode not in (0, 130), printed
    assert "Traceback" not in printed and 'File "' not in printed, printed
    assert len(printed[printed.rindex("Error: ") :].splitlines()) <= 5, printed
    for part in expected:
        assert filled(part) in printed, printed
