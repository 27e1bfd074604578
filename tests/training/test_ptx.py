"""PPO-ptx: the gradient of the language-model loss, its batches, and its effect."""

from dataclasses import replace

import deepspeed
import pyarrow as pa
import pytest
import torch
from ppo_runs import ppo_setup_of, run_ppo

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.batches import load_rows, micro_batches
from rlhf_pipeline.distributed.engine import training_settings
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.generation.records import Experience
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training.ppo_setup import load_ppo_models
from rlhf_pipeline.training.ppo_update import update_minibatch, update_models
from rlhf_pipeline.training.prompts import FurtherRows

BLOCKS = [[(5 + 7 * row + column * column) % 280 + 2 for column in range(8)] for row in range(6)]
PROMPTS = [[5, 6, 7], [10], [11, 12], [13, 14, 15, 16]]
RESPONSES = [[20, 1], [21, 22, 23, 1], [25], [26, 27, 1]]
ADVANTAGES = torch.tensor(
    [[0.5, -1.0, 0, 0], [1.0, 2.0, -0.5, 0.3], [-0.7, 0, 0, 0], [0.2, 0.1, -0.9, 0]]
)
TOKENS = 2 + 4 + 1 + 3
COEF = 2.5


def write(path, columns):
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


@pytest.fixture(scope="module")
def inputs(make_ppo_inputs, make_model, tmp_path_factory):
    """Those of PPO for a policy with padded vocabulary rows, and blocks of text."""
    sft, text = make_model("llama", seed=1, vocabulary=320), tmp_path_factory.mktemp("pretraining")
    TokenContract.read(sft).write(text)
    write(text / "train.arrow", {"input_ids": BLOCKS})
    return make_ppo_inputs(sft) | {"pretraining": text}


def config(**changes) -> PPOConfig:
    fields = {
        "steps": 2, "rollout_batch_size": 4, "minibatch_size": 4, "micro_batch_tokens": 48,
        "evaluations": 1, "sampling": {"max_response_tokens": 6, "temperature": 0.7},
        "advantage": "reinforce", "ptx": {"coef": COEF, "batch_size": 6},
        "actor": {
            "optimizer": {
                "learning_rate": 1e-3, "warmup_fraction": 0.0, "eps": 1e-4, "max_grad_norm": 1e9,
            },
        },
    }  # fmt: skip
    return PPOConfig.model_validate(fields | changes)


def job_of(inputs, folder) -> LaunchedJob:
    return LaunchedJob("ppo", "f", 1, {}, inputs, {}, folder, 60.0)


def models_of(config, inputs, world, folder):
    return load_ppo_models(
        job_of(inputs, folder), config, TokenContract.read(inputs["sft_model"]), world
    )


def descent(model, zero_stage):
    """An engine whose step subtracts the gradient from each parameter."""
    optimizer = {"learning_rate": 1.0, "max_grad_norm": 1e9}
    actor = config(actor={"optimizer": optimizer, "deepspeed": {"zero_stage": zero_stage}}).actor
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        config=training_settings(actor, hidden_size=32, on_gpu=False)
        | {"zero_allow_untested_optimizer": True},
    )
    return engine


def token_logprobs(model, ids, temperature):
    """Log-probability of each token but the first, among the 288 tokens of the vocabulary."""
    ids = torch.tensor(ids)
    logits = model(input_ids=ids[None]).logits[0, :-1, :288] / temperature
    return logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)


def text_loss_by_hand(model):
    """Six blocks of eight tokens contain 6 * 7 predicted tokens."""
    return -sum(token_logprobs(model, block, 1.0).sum() for block in BLOCKS) / 42


def gradients_by_hand(model):
    """Row by row, without padding. The policy is the one that sampled, so nothing is clipped."""
    loss = COEF * text_loss_by_hand(model)
    for prompt, response, advantages in zip(PROMPTS, RESPONSES, ADVANTAGES, strict=True):
        logprobs = token_logprobs(model, prompt + response, 0.7)[-len(response) :]
        loss = (
            loss
            - ((logprobs - logprobs.detach()).exp() * advantages[: len(response)]).sum() / TOKENS
        )
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return {
        name: gradient
        for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True)
    }


@pytest.fixture(scope="module")
def steps(inputs, world, tmp_path_factory, on_threads):
    """Takes one optimizer step on the rows above, on ranks that are threads.

    Returns the gradient of each parameter, averaged over the ranks as DeepSpeed does, and the sums
    of the metrics over the ranks.
    """
    models = models_of(config(), inputs, world, tmp_path_factory.mktemp("models"))
    table = load_rows(inputs["pretraining"] / "train.arrow", world)

    def step(*, ranks=1, tokens=24, zero_stage=1):
        policies = [load_policy(inputs["sft_model"], "fp32") for _ in range(ranks)]
        engines = [descent(policy, zero_stage) for policy in policies]
        before = {name: value.detach().clone() for name, value in policies[0].named_parameters()}
        options = config(micro_batch_tokens=tokens)

        def one(world):
            rank, own = world.rank, slice(world.rank, None, ranks)
            sequences = collate(PROMPTS[own], RESPONSES[own], 0)
            width = sequences.response_ids.shape[1]
            old = torch.zeros(len(sequences), width)
            for row, (prompt, response) in enumerate(
                zip(PROMPTS[own], RESPONSES[own], strict=True)
            ):
                with torch.no_grad():
                    logprobs = token_logprobs(policies[rank], prompt + response, 0.7)
                old[row, : len(response)] = logprobs[-len(response) :]
            experience = Experience(sequences, old, ADVANTAGES[own, :width])
            text = FurtherRows(table, 6, 1, options, world, 1).batch(0)
            setup = ppo_setup_of(replace(models, actor=engines[rank]), options, world)
            (groups,) = micro_batches([experience.sequences.lengths], tokens, engines[rank], world)
            pieces = [experience.rows(index) for index in groups]
            sums = update_minibatch(setup, pieces, {}, kl_coef=0.1, train_actor=True, text=text)
            return world.sums(sums)

        sums = on_threads(ranks, one)
        gradients = {
            name: sum(before[name] - policy.get_parameter(name).detach() for policy in policies)
            / ranks
            for name in before
        }
        return gradients, sums[0]

    return step


@pytest.mark.parametrize(
    ("ranks", "tokens", "zero_stage"),
    [(1, 24, 0), (1, 1, 1), (1, 99, 2), (2, 1, 0), (2, 16, 1), (2, 99, 2)],
)
def test_the_gradient_is_that_of_both_losses(steps, inputs, ranks, tokens, zero_stage):
    gradients, sums = steps(ranks=ranks, tokens=tokens, zero_stage=zero_stage)
    model = load_policy(inputs["sft_model"], "fp32")
    for name, gradient in gradients_by_hand(model).items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=2e-6)
    assert sums["ptx/count"] == 42
    assert sums["ptx/loss"] / 42 == pytest.approx(text_loss_by_hand(model).item(), rel=1e-5)


def test_loss_and_perplexity_of_a_uniform_model(inputs, world, tmp_path):
    """With logits of zero, each of 288 tokens has probability 1/288: a loss of ln 288 nats."""
    options = config(actor={"optimizer": {"learning_rate": 1e-12}})
    models = models_of(options, inputs, world, tmp_path)
    with torch.no_grad():
        models.actor.module.lm_head.weight.zero_()
    experience = Experience(collate(PROMPTS, RESPONSES, 0), torch.zeros(4, 4), ADVANTAGES)
    batches = FurtherRows(
        load_rows(inputs["pretraining"] / "train.arrow", world), 6, 1, options, world, 1
    )
    metrics = update_models(ppo_setup_of(models, options, world, text=batches), experience, 1, 0.1)
    assert metrics["ptx/loss"] == pytest.approx(5.6629605, rel=1e-6)
    assert metrics["ptx/perplexity"] == pytest.approx(288.0, rel=1e-5)


def text(inputs, world, **changes) -> FurtherRows:
    rows, options = load_rows(inputs["pretraining"] / "train.arrow", world), config(**changes)
    return FurtherRows(rows, options.ptx.batch_size, 1, options, world, 1)


def test_all_tokens_of_a_block_but_the_first_are_predicted(inputs, world):
    batch = text(inputs, world).batch(0)
    assert sorted(
        (batch.prompt_ids.tolist()[row] + ids)
        for row, ids in enumerate(batch.response_ids.tolist())
    ) == sorted(BLOCKS)
    assert (
        batch.prompt_mask.all() and batch.action_mask.all() and batch.response_ids.shape == (6, 7)
    )


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


def test_ranks_divide_a_batch(inputs, world):
    whole = text(inputs, world).batch(3).response_ids
    for rank in range(2):
        own = (
            replace(text(inputs, world), world=World(rank, 2, torch.device("cpu")))
            .batch(3)
            .response_ids
        )
        assert own.tolist() == whole[rank::2].tolist()


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
    assert run.setup.models.actor.global_steps == 1
