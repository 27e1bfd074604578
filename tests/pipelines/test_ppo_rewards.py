"""The stage ppo with a reward function: a real launch on two ranks learns what it rewards."""

import json
import os
from contextlib import suppress
from uuid import uuid4

import psutil
import pyarrow as pa
import pytest

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.models.loading import load_tokenizer
from rlhf_pipeline.pipelines.ppo import ppo
from rlhf_pipeline.runtime.manifest import Manifest, file_entries
from rlhf_pipeline.stages.job import RunContext
from rlhf_pipeline.stages.run import StageRunner

pytestmark = pytest.mark.long
SHORT = (
    "def short(prompts, responses):\n    return [-len(response) / 10 for response in responses]\n"
)


def finished(folder):
    Manifest("by hand", "f", 1, {}, {}, {}, {}, file_entries(folder)).write(folder)
    return folder


@pytest.fixture
def artifacts(make_model, tmp_path):
    """A split of 32 prompts, and a random policy; nothing reads the reward model."""
    sft, split = make_model("llama", seed=1), tmp_path / "split"
    tokenizer = load_tokenizer(sft)
    messages = [[{"role": "user", "content": f"what is {n}?"}] for n in range(32)]
    ids = [
        tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False)
        for m in messages
    ]
    table = pa.table(
        {
            "id": [str(n) for n in range(32)],
            "prompt_ids": ids,
            "source": ["files"] * 32,
            "messages": messages,
            "reference": ["x"] * 32,
        }
    )
    (split / "ppo").mkdir(parents=True)
    for name in ("train", "validation"):
        path = str(split / "ppo" / f"{name}.arrow")
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    TokenContract.read(sft).write(split / "ppo")
    return finished(split), finished(sft), sft


def training(*rewards, **changes):
    fields = {
        "steps": 20,
        "rollout_batch_size": 32,
        "minibatch_size": 32,
        "micro_batch_tokens": 256,
        "ppo_epochs": 2,
        "advantage": "reinforce",
        "evaluations": 1,
        "evaluation_prompts": 16,
        "sampling": {"max_response_tokens": 12},
        "kl": {"coef": 0.0},
        "missing_eos_penalty": 0.0,
        "rewards": rewards,
        "actor": {"optimizer": {"learning_rate": 1e-2}},
    }
    return PPOConfig.model_validate(fields | changes)


def launched(artifacts, config, tmp_path):
    context = RunContext(tmp_path / "workspace", LaunchConfig(processes=2))
    return ppo(*artifacts, None, config, 1, StageRunner(context))


def metrics(export):
    lines = (export.parent / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"] for line in lines]


def test_the_reward_of_a_function_rises_and_its_source_is_part_of_the_recipe(artifacts, tmp_path):
    source = tmp_path / "my_rewards.py"
    source.write_text(SHORT)
    config = training(f"{source}:short")

    def run():
        return launched(artifacts, config, tmp_path)

    export = run()
    scores = [line["objective/score"] for line in metrics(export)]
    assert scores[-1] > scores[0] + 0.3, scores  # three characters
    assert run() == export
    source.write_text(SHORT.replace("-len(response) / 10", "float('nan')"))
    with pytest.raises(
        StageError,
        match=r"my_rewards.py:short: found nan, expected a finite number, for the response '.*' "
        r"to the prompt \[\{'role'",
    ):
        run()
    source.write_text(SHORT)
    assert run() == export


HANGS = """
import os, time
from pathlib import Path

def short(prompts, responses):
    if len(responses) == 1 and Path(__file__).with_name("hang").exists():
        os.fork() or os.setsid() or os.fork()
        time.sleep(60)
        os._exit(0)
    return [-len(response) / 10 for response in responses]
"""


@pytest.mark.usefixtures("bubblewrap")
def test_functions_in_processes_and_programs_in_a_sandbox_score_beside_each_other(
    artifacts, tmp_path, monkeypatch
):
    """A function in processes trains as one without. One that hangs ends the stage and leaves none
    of what it has started."""
    monkeypatch.setenv("ISOLATION_TEST", mark := uuid4().hex)
    source = tmp_path / "my_rewards.py"
    source.write_text(HANGS)
    isolated = {"callable": f"{source}:short", "processes": 2, "timeout_s": 5}
    programs = {"code": "python", "name": "tests"}
    given = training(isolated, programs, steps=2)
    lines = metrics(launched(artifacts, given, tmp_path))
    assert [line["replies/tests/failed"] for line in lines] == [1.0, 1.0]
    alone = training(f"{source}:short", programs, steps=2)
    assert alone.recipe() == given.recipe()
    apart = metrics(launched(artifacts, alone, tmp_path / "other"))
    assert [line["reward/short"] for line in lines] == [line["reward/short"] for line in apart]
    (tmp_path / "hang").touch()
    with pytest.raises(
        StageError,
        match=r"my_rewards\.py:short took longer than 5 s \(timeout_s\) at the response '.*' to "
        r"the prompt \[\{'role'",
    ):
        launched(artifacts, given, tmp_path / "third")
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("ISOLATION_TEST") == mark:
                found.append(process)
    assert found == []
