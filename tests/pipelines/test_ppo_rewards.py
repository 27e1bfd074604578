"""The stage ppo with a reward function: a real launch on two ranks learns what it rewards."""

import json

import pytest

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.pipelines.ppo import ppo
from rlhf_pipeline.stages.job import RunContext
from rlhf_pipeline.stages.run import StageRunner

pytestmark = pytest.mark.long
SHORT = (
    "def short(prompts, responses):\n    return [-len(response) / 10 for response in responses]\n"
)


FIELDS = {
    "steps": 20, "rollout_batch_size": 32, "minibatch_size": 32, "micro_batch_tokens": 256,
    "ppo_epochs": 2, "advantage": "reinforce", "evaluations": 1, "evaluation_prompts": 16,
    "sampling": {"max_response_tokens": 12}, "kl": {"coef": 0.0}, "missing_eos_penalty": 0.0,
    "actor": {"optimizer": {"learning_rate": 1e-2}},
}  # fmt: skip


def test_the_reward_of_a_function_rises_and_its_source_is_part_of_the_recipe(
    prompts_and_policy, tmp_path
):
    source = tmp_path / "my_rewards.py"
    source.write_text(SHORT)
    config = PPOConfig.model_validate(FIELDS | {"rewards": [f"{source}:short"]})

    def run():
        context = RunContext(tmp_path / "workspace", LaunchConfig(processes=2))
        return ppo(*prompts_and_policy, tmp_path, None, config, 1, StageRunner(context))

    export = run()
    lines = (export.parent / "metrics.jsonl").read_text().splitlines()
    scores = [json.loads(line)["metrics"]["objective/score"] for line in lines]
    assert scores[-1] > scores[0] + 0.3, scores  # three characters
    assert run() == export
    source.write_text(SHORT.replace("-len(response) / 10", "float('nan')"))
    message = r"my_rewards.py:short: found nan, expected a finite number, for the response '.*' to "
    with pytest.raises(StageError, match=message + r"the prompt \[\{'role'"):
        run()
    source.write_text(SHORT)
    assert run() == export
