"""PPO-ptx: the gradient of the language-model loss, its batches, and its effect."""

import math
from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from ppo_runs import ppo_config, ppo_setup_of, run_ppo
from rank_fixtures import write_table
from training.by_hand import Descent, token_logprobs

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.batches import load_rows, micro_batches
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.generation.records import Experience
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training.ppo_setup import load_ppo_models
from rlhf_pipeline.training.ppo_update import update_minibatch
from rlhf_pipeline.training.prompts import FurtherRows

BLOCKS = [[(5 + 7 * row + column * column) % 280 + 2 for column in range(8)] for row in range(6)]
PROMPTS = [[5, 6, 7], [10], [11, 12], [13, 14, 15, 16]]
RESPONSES = [[20, 1], [21, 22, 23, 1], [25], [26, 27, 1]]
ADVANTAGES = torch.tensor(
    [[0.5, -1.0, 0, 0], [1.0, 2.0, -0.5, 0.3], [-0.7, 0, 0, 0], [0.2, 0.1, -0.9, 0]]
)
TOKENS = 2 + 4 + 1 + 3
COEF = 2.5


@pytest.fixture(scope="module")
def inputs(make_ppo_inputs, make_model, tmp_path_factory):
    """Those of PPO for a policy with padded vocabulary rows, and blocks of text."""
    sft, folder = make_model("llama", seed=1, vocabulary=320), tmp_path_factory.mktemp("text")
    text = write_table(pa.table({"input_ids": BLOCKS}), folder, TokenContract.read(sft))
    return make_ppo_inputs(sft) | {"pretraining": text}


def config(**changes) -> PPOConfig:
    optimizer = {"learning_rate": 1e-3, "warmup_fraction": 0.0, "eps": 1e-4, "max_grad_norm": 1e9}
    fields = {
        "rollout_batch_size": 4, "minibatch_size": 4, "evaluations": 1, "advantage": "reinforce",
        "critic": None, "sampling": {"max_response_tokens": 6, "temperature": 0.7},
        "ptx": {"coef": COEF, "batch_size": 6}, "actor": {"optimizer": optimizer},
    }  # fmt: skip
    return ppo_config(**fields | changes)


def text(inputs, world, **changes) -> FurtherRows:
    rows, options = load_rows(inputs["pretraining"] / "train.arrow", world), config(**changes)
    return FurtherRows(rows, options.ptx.batch_size, 1, options, world, 1)


def text_loss_by_hand(model):
    """Six blocks of eight tokens contain 6 * 7 predicted tokens."""
    return -sum(token_logprobs(model, block[:1], block[1:]).sum() for block in BLOCKS) / 42


def gradients_by_hand(model):
    """Row by row, without padding. The policy is the one that sampled, so nothing is clipped."""
    loss = COEF * text_loss_by_hand(model)
    for prompt, response, advantages in zip(PROMPTS, RESPONSES, ADVANTAGES, strict=True):
        logprobs = token_logprobs(model, prompt, response, 0.7)
        ratios = (logprobs - logprobs.detach()).exp()
        loss = loss - (ratios * advantages[: len(response)]).sum() / TOKENS
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.fixture(scope="module")
def steps(inputs, world, tmp_path_factory, on_threads):
    """Takes one optimizer step on the rows above, on ranks that are threads.

    Returns the gradient of each parameter, and the sums of the metrics over the ranks.
    """
    job = LaunchedJob("ppo", "f", 1, {}, inputs, {}, tmp_path_factory.mktemp("models"), 60.0)
    models = load_ppo_models(job, config(), TokenContract.read(inputs["sft_model"]), world)

    def step(ranks, tokens, zero_stage):
        optimizer = {"learning_rate": 1.0, "max_grad_norm": 1e9}
        actor = {"optimizer": optimizer, "deepspeed": {"zero_stage": zero_stage}}
        options = config(micro_batch_tokens=tokens, actor=actor)
        policies = [load_policy(inputs["sft_model"], "fp32") for _ in range(ranks)]
        descent = Descent(policies, options.actor)

        def one(world):
            own, engine = slice(world.rank, None, ranks), descent.engines[world.rank]
            sequences = collate(PROMPTS[own], RESPONSES[own], 0)
            old = torch.zeros(sequences.response_ids.shape)
            rows = zip(PROMPTS[own], RESPONSES[own], strict=True)
            for row, (prompt, response) in enumerate(rows):
                logprobs = token_logprobs(policies[world.rank], prompt, response, 0.7)
                old[row, : len(response)] = logprobs.detach()
            experience = Experience(sequences, old, ADVANTAGES[own, : old.shape[1]])
            setup = ppo_setup_of(replace(models, actor=engine), options, world)
            (groups,) = micro_batches([sequences.lengths], tokens, engine, world)
            sums = update_minibatch(
                setup, [experience.rows(index) for index in groups], {}, kl_coef=0.1,
                train_actor=True, text=text(inputs, world).batch(0),
            )  # fmt: skip
            return world.sums(sums)

        sums, *_ = on_threads(ranks, one)
        return descent.gradients(), sums

    return step


@pytest.mark.parametrize(
    ("ranks", "tokens", "zero_stage"),
    [(1, 24, 0), (1, 1, 1), (1, 99, 2), (2, 1, 0), (2, 16, 1), (2, 99, 2)],
)
def test_the_gradient_is_that_of_both_losses(steps, inputs, ranks, tokens, zero_stage):
    gradients, sums = steps(ranks, tokens, zero_stage)
    model = load_policy(inputs["sft_model"], "fp32")
    for found, gradient in zip(gradients.values(), gradients_by_hand(model), strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=2e-6)
    assert sums["ptx/count"] == 42
    assert sums["ptx/loss"] / 42 == pytest.approx(text_loss_by_hand(model).item(), rel=1e-5)


def test_the_n_th_update_of_a_run_takes_the_n_th_batch(inputs, world):
    """Two steps of warm-up have no update, the others two: step 5 takes the batches 4 and 5."""
    batches = text(
        inputs, world, steps=9, ppo_epochs=2, critic_warmup_steps=2, advantage="gae",
        critic=config().actor.model_dump(), ptx={"batch_size": 2},
    )  # fmt: skip
    numbered = [batches.batch(number).response_ids.tolist() for number in range(6)]
    assert [batch.response_ids.tolist() for batch in batches.of_step(5)] == numbered[4:6]
    assert [batch.response_ids.tolist() for batch in batches.of_step(3)] == numbered[:2]
    one_pass = [row for batch in numbered[:3] for row in batch]
    assert sorted(one_pass) == sorted(block[1:] for block in BLOCKS)


def test_all_tokens_of_a_block_but_the_first_are_predicted(inputs, world):
    batch = text(inputs, world).batch(0)
    both = zip(batch.prompt_ids.tolist(), batch.response_ids.tolist(), strict=True)
    assert sorted(prompt + ids for prompt, ids in both) == sorted(BLOCKS)
    assert batch.prompt_mask.all() and batch.action_mask.all()
    assert batch.response_ids.shape == (6, 7)


def test_ranks_divide_a_batch(inputs, world):
    whole = text(inputs, world).batch(3).response_ids
    for rank in range(2):
        own = replace(text(inputs, world), world=World(rank, 2, torch.device("cpu")))
        assert own.batch(3).response_ids.tolist() == whole[rank::2].tolist()


def test_updates_that_are_skipped_skip_their_batches(inputs, world, tmp_path, monkeypatch):
    taken, batch = [], FurtherRows.batch
    monkeypatch.setattr(
        FurtherRows, "batch", lambda self, number: taken.append(number) or batch(self, number)
    )
    run_ppo(config(ppo_epochs=4, kl={"stop_update": 1e-8}), inputs, world, tmp_path)
    assert taken == [0, 1, 4, 5]


def test_text_is_trained_on_only_while_the_actor_trains(inputs, world, tmp_path):
    options = config(advantage="gae", critic=config().actor.model_dump(), critic_warmup_steps=1)
    run = run_ppo(options, inputs, world, tmp_path)
    names = [sorted(name for name in line if "ptx" in name) for line in run.lines]
    assert names == [[], ["ptx/loss", "ptx/perplexity"]]
    expected = text_loss_by_hand(load_policy(inputs["sft_model"], "fp32")).item()
    assert run.lines[1]["ptx/loss"] == pytest.approx(expected, rel=1e-5)  # the first update
    assert run.lines[1]["ptx/perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert run.setup.models.actor.global_steps == 1
