"""The ppo node with a function of the user's: a real launch on two ranks that learns what the function rewards."""

import json

import pyarrow as pa
import pytest

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.models.loading import load_tokenizer
from rlhf_pipeline.pipelines.ppo.nodes import ppo
from rlhf_pipeline.runtime.manifest import Manifest, file_entries

pytestmark = pytest.mark.long
SHORT = (
    "def short(prompts, responses):\n    return [-len(response) / 10 for response in responses]\n"
)


def finished(folder):
    Manifest("by hand", "f", 1, {}, {}, {}, {}, file_entries(folder)).write(folder)
    return folder


@pytest.fixture
def artifacts(make_model, tmp_path):
    """A random policy that is its own base of a critic's absence, and 32 prompts."""
    sft, prepared = make_model("llama", seed=1), tmp_path / "prepared"
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
    (prepared / "ppo").mkdir(parents=True)
    for name in ("train", "validation"):
        path = str(prepared / "ppo" / f"{name}.arrow")
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    TokenContract.read(sft).write(prepared / "ppo")
    return finished(prepared), finished(sft), sft


def test_a_function_s_reward_rises_and_its_source_is_part_of_the_recipe(artifacts, tmp_path):
    source = tmp_path / "my_rewards.py"
    source.write_text(SHORT)
    config = PPOConfig.model_validate(
        {
            "steps": 12, "rollout_batch_size": 32, "minibatch_size": 32, "micro_batch_size_per_gpu": 16, "ppo_epochs": 2,
            "advantage": "reinforce", "evaluations": 1, "evaluation_prompts": 16, "sampling": {"max_response_tokens": 12},
            "kl": {"coef": 0.0}, "missing_eos_score": None, "rewards": [f"{source}:short"],
            "actor": {"optimizer": {"learning_rate": 1e-2}},
        }
    )  # fmt: skip

    def run():
        return ppo(*artifacts, config, LaunchConfig(processes=2), 1, tmp_path / "workspace")

    export = run()
    lines = [
        json.loads(line)["metrics"]
        for line in (export.parent / "metrics.jsonl").read_text().splitlines()
    ]
    scores = [line["objective/score"] for line in lines]
    assert scores[-1] > scores[0] + 0.3, scores  # three characters
    assert run() == export
    source.write_text(SHORT.replace("-len(response) / 10", "float('nan')"))
    with pytest.raises(
        StageError,
        match=r"my_rewards.py:short returned nan for the response '.*' to the prompt \[\{'role'",
    ):
        run()
    source.write_text(SHORT)
    assert run() == export
