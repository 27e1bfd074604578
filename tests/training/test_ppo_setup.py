"""The models of PPO together: their scales and their precision."""

import pytest
import torch
from ppo_runs import ppo_config, ppo_setup_of

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training.ppo import train
from rlhf_pipeline.training.ppo_setup import load_ppo_models, set_up
from rlhf_pipeline.training.rollouts import score_sequences

SEQUENCES = collate([[5, 6, 7], [8]], [[9, 10, 11], [12, 13]], 0)


def job_of(inputs, folder) -> LaunchedJob:
    return LaunchedJob("ppo", "f", 1, {}, inputs, {}, folder, 60.0)


@pytest.mark.parametrize(
    ("weight", "scale"),
    [(1.0, 1.0), (0.5, 0.5), (0.0, 1.0)],  # a reward model without effect leaves its own scale
)
def test_the_critic_starts_on_the_scale_of_the_scores(ppo_inputs, world, tmp_path, weight, scale):
    """A critic that reads a whole response estimates its score; the first step moves the mean."""
    config = ppo_config(rewards=[{"model": "trained", "weight": weight}])
    contract = TokenContract.read(ppo_inputs["sft_model"])
    models = load_ppo_models(job_of(ppo_inputs, tmp_path), config, contract, world)
    inputs = SEQUENCES.rows(torch.tensor([0])).model_inputs()
    estimate = models.critic(**inputs, scores_to_keep=1)[0, 0]
    raw = score_sequences(ppo_setup_of(models, config, world), SEQUENCES, with_critic=False)
    score, of_model = models.rewards(raw, {}).scores[0], float(raw.scores[0])
    assert float(score) == pytest.approx(weight * (of_model - 0.1), abs=1e-5)
    assert float(estimate) == pytest.approx(scale * of_model, abs=1e-5)


def test_without_a_reward_model_the_critic_is_the_policy_with_a_new_head(ppo_inputs, train_ppo):
    inputs = {name: path for name, path in ppo_inputs.items() if name != "reward_model"}
    run = train_ppo(inputs=inputs, rewards=[{"regex": "."}])
    start, policy = run.start["critic"], run.start["actor"]
    shared = [name for name in start if name.endswith("embed_tokens.weight")]
    assert len(shared) == 1
    assert torch.equal(start[shared[0]], policy["model.embed_tokens.weight"])
    head = next(value for name, value in start.items() if name.endswith("score.weight"))
    assert float(head.std()) == pytest.approx((head.shape[1] + 1) ** -0.5, rel=0.5)
    assert all("value/loss" in line for line in run.lines)


def test_a_critic_of_its_own_size_reads_the_tokens_of_the_policy(ppo_inputs, make_model, train_ppo):
    """It values them with a new head, so the weight of the reward model scales nothing."""
    small = make_model("llama", seed=3, hidden_size=16)
    critic = dict(ppo_config().critic) | {"start": "own", "base_model": {"path": str(small)}}
    run = train_ppo(
        inputs=ppo_inputs | {"critic_base": small}, critic=critic,
        rewards=[{"model": "trained", "weight": 0.5}],
    )  # fmt: skip
    start = run.start["critic"]
    embedding = next(value for name, value in start.items() if name.endswith("embed_tokens.weight"))
    assert torch.equal(embedding, load_policy(small, "fp32").get_input_embeddings().weight)
    assert run.setup.models.critic.module.scale == 1.0
    assert [line["value/loss"] > 0 for line in run.lines] == [True, True]


def test_a_reward_model_of_the_user_whose_bit_changes_ends_training(ppo_inputs, world, tmp_path):
    """Its weights are compared at each checkpoint, as those of reference and reward model are."""
    inputs = {name: path for name, path in ppo_inputs.items() if name != "reward_model"}
    config = ppo_config(rewards=[{"path": str(ppo_inputs["reward_model"]), "name": "mine"}])
    contract = TokenContract.read(inputs["sft_model"])
    setup = set_up(job_of(inputs, tmp_path), config, contract, world)
    model = setup.models.rewards.sources["mine"].score.model
    weight = next(parameter for parameter in model.parameters())
    weight.data.view(torch.int32)[0, 0] ^= 1
    with pytest.raises(StageError, match=r"rewards\.mine: .*found other bits on rank 0"):
        train(setup)
