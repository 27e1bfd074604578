"""Mistakes at the command line and in YAML, each through the real command: one message of at most
five lines, without a stack, that names the place and the fix."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).parents[1]
CSV = "prompt,better,worse\n" + "".join(f"hello {i},a good {i},a bad {i}\n" for i in range(40))


@dataclass
class Mistake:
    """A command, and what its message must contain."""

    expected: list[str]
    options: list[str] = field(default_factory=list)
    params: str = ""
    yaml: str = ""
    """Text of conf/mistake/parameters.yml."""
    env: str = "mistake"
    command: str = "run"
    store: str = "sqlite:///{tmp}/ml.db"


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
    "unknown top-level parameter": Mistake(
        ["seeed (--params): unknown parameter (did you mean seed?)"], params="seeed=5"
    ),
    "wrong type": Mistake(
        ["ppo.steps (--params): found 'many', expected a whole number"], params="ppo.steps=many"
    ),
    "negative learning rate": Mistake(
        ["sft.optimizer.learning_rate (--params): found -1, expected more than 0"],
        params="sft.optimizer.learning_rate=-1",
    ),
    "fraction above one": Mistake(
        ["split.test_fraction (--params): found 1.5, expected less than 1"],
        params="split.test_fraction=1.5",
    ),
    "list of zeros": Mistake(
        ["split.weights", "found [0.0, 0.0, 0.0]; expected finite, non-negative numbers"],
        yaml="split: {weights: [0, 0, 0]}\n",
    ),
    "unknown choice": Mistake(
        ["ppo.advantage (--params): found 'gea', expected 'gae', 'rloo', 'grpo' or 'reinforce'"],
        params="ppo.advantage=gea",
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
    "batch that the ranks cannot share": Mistake(
        ["sft.batch_size (--params): found 15, expected a multiple of 2 ranks", "use 14 or 16"],
        params="sft.batch_size=15",
    ),
    "unknown pipeline": Mistake(
        ["--pipeline: found 'ful' (did you mean full?)"], options=["--pipeline=ful"]
    ),
    "unknown node": Mistake(
        ["--from-nodes: found 'pppo' (did you mean ppo?)"], options=["--from-nodes=pppo"]
    ),
    "unknown data set": Mistake(
        ["--to-outputs: found 'sft_modle' (did you mean sft_model?)"],
        options=["--to-outputs=sft_modle"],
    ),
    "options that leave no node": Mistake(
        ["no node of the pipeline fits all options"],
        options=["--from-nodes=ppo", "--to-nodes=sft"],
    ),
    "unknown environment": Mistake(["--env: found 'tinny' (did you mean tiny?)"], env="tinny"),
    "unknown option": Mistake(["No such option '--parms'"], options=["--parms=seed=5"]),
    "parameter without a value": Mistake(
        ["Item `seed` must contain a key and a value"], params="seed"
    ),
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
    "missing .gguf file": Mistake(
        ["base_model.path (--params): found no file '/no/such.gguf'. Fix: check the spelling"],
        params="base_model.path=/no/such.gguf",
    ),
    "model folder without a model": Mistake(
        ["base_model.path (--params): found '{tmp}', a folder without config.json"],
        params="base_model.path={tmp}",
    ),
    "hub that is unreachable": Mistake(
        ["base_model.path: the hub did not return the commit of 'nobody/nothing'", "Fix: check"],
        params="base_model.path=nobody/nothing",
    ),
    "missing data file": Mistake(
        ["{tmp}/none.csv", "Fix"],
        yaml=sources("name: files, path: '{tmp}/none.csv'"),
    ),
    "unknown source": Mistake(
        ["split.sources.0.name", "'filez'", "files"], yaml=sources("name: filez, path: x.csv")
    ),
    "prompt without a column": Mistake(
        [
            "set columns.prompt; the columns are 'prompt', 'better', 'worse'",
            "correct the source's `col",
        ],
        yaml=sources(
            "name: files, path: '{tmp}/pairs.csv', columns: {chosen: better, rejected: worse}"
        ),
    ),
    "misspelt column": Mistake(
        ["column 'beter' is missing; the columns are 'prompt', 'better', 'worse'"],
        yaml=sources(
            "name: files, path: '{tmp}/pairs.csv', "
            "columns: {prompt: prompt, chosen: beter, rejected: worse}"
        ),
    ),
    "no column map": Mistake(
        [
            "split.sources.0: source files (pairs.csv): the columns do not say which of them to "
            "read; they are 'prompt', 'better', 'worse'. Fix: add to the source a line such as "
            "columns: {prompt: COLUMN, chosen: COLUMN, rejected: COLUMN}"
        ],
        yaml=sources("name: files, path: '{tmp}/pairs.csv'"),
    ),
    "results that nothing has made yet": Mistake(
        ["no version of reward_model, sft_model, split is published", "--pipeline=full"],
        options=["--from-nodes=ppo"],
    ),
    "a phase without rows": Mistake(
        ["split.weights: found [0.0, 4.0, 4.0], with 0 for sft, expected more than 0"],
        yaml="split: {weights: [0, 4, 4]}\n",
    ),
    "misspelt tracking store": Mistake(
        ["MLFLOW_TRACKING_URI: found 'sqllite:///ml.db'", "(did you mean sqlite?)", "unset it"],
        store="sqllite:///ml.db",
    ),
    "occupied port": Mistake(
        ["launch.master_port", "{port}", "Fix"], params="launch.master_port={port}"
    ),
    "unknown parameter of status": Mistake(
        ["ppo.kl.coeff (--params): unknown parameter"],
        params="ppo.kl.coeff=0.2",
        command="rlhf status",
        env="tiny",
    ),
    "a phase without rows, of status": Mistake(
        ["split.weights: found [0.0, 4.0, 4.0], with 0 for sft, expected more than 0"],
        yaml="split: {weights: [0, 4, 4]}\n",
        command="rlhf status",
    ),
    "a reward that cannot be called, of status": Mistake(
        ["{tmp}/rewards.py:kw cannot be called with (prompts, responses): too many positional"],
        yaml="ppo: {rewards: ['{tmp}/rewards.py:kw']}\n",
        command="rlhf status",
    ),
    "occupied port, of status": Mistake(
        ["launch.master_port", "{port}", "Fix"],
        params="launch.master_port={port}",
        command="rlhf status",
    ),
    "unknown pipeline of status": Mistake(
        ["found 'ful' (did you mean full?)"],
        options=["--pipeline=ful"],
        command="rlhf status",
        env="tiny",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    shutil.copytree(PROJECT / "conf", folder / "conf")
    (folder / "pairs.csv").write_text(CSV)
    (folder / "rewards.py").write_text("def kw(*, prompts, responses): ...\n")
    return folder


@pytest.fixture(scope="module")
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_short_message_with_place_and_fix(mistake, folder, port):
    def filled(text: str) -> str:
        return text.replace("{tmp}", str(folder)).replace("{port}", port)

    environment = folder / "conf" / "mistake"
    environment.mkdir(exist_ok=True)
    (environment / "globals.yml").write_text(f"root: {folder}/data\n")
    (environment / "parameters.yml").write_text(filled(mistake.yaml) or "{}\n")
    options = [f"--env={mistake.env}", *mistake.options]
    if mistake.env == "mistake":
        options.append(f"--conf-source={folder / 'conf'}")
    if mistake.params:
        options.append(f"--params={filled(mistake.params)}")
    result = subprocess.run(
        [sys.executable, "-m", "kedro", *mistake.command.split(), *options],
        cwd=PROJECT,
        env=os.environ
        | {"PYTHONPATH": str(PROJECT / "src"), "MLFLOW_TRACKING_URI": filled(mistake.store)}
        | {"HF_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    printed = result.stdout + result.stderr
    assert result.returncode not in (0, 130), printed
    message = printed[printed.rindex("Error: ") :]
    assert "Traceback" not in printed and 'File "' not in printed, printed
    assert len(message.splitlines()) <= 5, printed
    for part in mistake.expected:
        assert filled(part) in printed, printed
