"""Batches, steps, tokens, operations and disk, worked by hand."""

import pytest

from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.shape import Shape
from rlhf_pipeline.sizing.work import Lengths, forward_flops, stage_work

SHAPE = Shape.of(
    {"model_type": "llama", "hidden_size": 100, "num_hidden_layers": 4, "num_attention_heads": 4,
     "intermediate_size": 400, "vocab_size": 1000, "tie_word_embeddings": True}
)  # fmt: skip
MATRICES, WEIGHTS = 640_000, 740_900
OPTIMIZER = {"optimizer": {"learning_rate": 1e-3}}
LENGTHS = {
    "sft": Lengths(1000, 30, 20, 40, 60),
    "reward_model": Lengths(500, 30, 40, 40, 120, copies=2),
    "ppo": Lengths(800, 30, 0, 40, 0),
}
RANKS = Hardware(2)


def work(stage, **block):
    block |= {} if stage == "ppo" else OPTIMIZER
    return stage_work(stage, {stage: block}, SHAPE, RANKS, LENGTHS)


def test_a_forward_pass_has_two_operations_for_each_weight_and_those_of_attention():
    # 10 tokens in rows of 50: causal attention reads half of the row, keys and values, twice.
    assert forward_flops(SHAPE, 10, 50) == 10 * (2 * (MATRICES + 100_000) + 2 * 4 * 100 * 50)
    assert forward_flops(SHAPE, 10, 50, head=False) == 10 * (2 * MATRICES + 2 * 4 * 100 * 50)


def test_sft():
    found = work("sft", epochs=2, batch_size=32, micro_batch_tokens=300)
    assert (found.batch, found.rows_per_rank) == (32, 16)
    assert found.micro_batches == 3  # 16 rows of 50 tokens
    assert found.steps == found.updates == 62  # 2000 rows
    assert found.tokens == 62 * 32 * 50
    assert found.flops == 3 * forward_flops(SHAPE, 62 * 32 * 50, 50)
    assert found.checkpoints == 3 * 12 * WEIGHTS  # two are kept, one is written
    assert found.saved_models == 3 * 4 * WEIGHTS  # best, last, export


def test_a_comparison_has_its_prompt_twice():
    found = work("reward_model", epochs=1, batch_size=50, micro_batch_tokens=5000)
    assert found.tokens == 10 * 50 * (2 * 30 + 40)
    # The scalar head replaces the output layer, which is tied.
    assert found.saved_models == 3 * 4 * WEIGHTS


def test_ppo():
    found = work(
        "ppo",
        steps=5, rollout_batch_size=16, minibatch_size=8, micro_batch_tokens=1000, ppo_epochs=2,
        sampling={"max_response_tokens": 20}, actor=OPTIMIZER, critic=OPTIMIZER, ema={},
    )  # fmt: skip
    assert found.updates == 5 * 2 * 2
    sampled = 5 * 16 * 50
    assert found.tokens == 2 * sampled
    whole, body = (forward_flops(SHAPE, sampled, 50, head=head) for head in (True, False))
    # Generation, actor and reference; reward model and critic; two epochs of training.
    assert found.flops == pytest.approx(3 * whole + 2 * body + 2 * 3 * (whole + body))
    critic = WEIGHTS + 100
    assert found.checkpoints == 3 * (16 * WEIGHTS + 12 * critic)
    assert found.saved_models == 2 * 3 * 4 * WEIGHTS


PPO = {
    "rollout_batch_size": 16,
    "minibatch_size": 8,
    "micro_batch_tokens": 1000,
    "critic": OPTIMIZER,
}


@pytest.mark.parametrize(
    ("steps", "optimizer", "lora", "rates", "cannot_move"),
    [
        (10, {"learning_rate": 1e-5}, None, 10 * 2 * 0.5e-5, True),  # 1e-4; a cosine has half
        (10, {"learning_rate": 1e-5, "schedule": "constant"}, None, 10 * 2 * 1e-5, False),
        (60, {"learning_rate": 2e-5}, None, 60 * 2 * 1e-5, False),
        (10, {"learning_rate": 1e-5}, {"rank": 4}, None, False),
    ],
)
def test_rates_that_cannot_move_a_policy(steps, optimizer, lora, rates, cannot_move):
    actor = {"optimizer": optimizer, "lora": lora}
    found = work("ppo", steps=steps, actor=actor, sampling={"max_response_tokens": 20}, **PPO)
    assert found.rate_sum == (None if rates is None else pytest.approx(rates))
    assert found.cannot_move is cannot_move


def test_steps_are_not_known_without_rows():
    lengths = LENGTHS | {"sft": Lengths(None, 30, 20, 40, 60)}
    block = OPTIMIZER | {"epochs": 2, "batch_size": 32, "micro_batch_tokens": 300}
    found = stage_work("sft", {"sft": block}, SHAPE, RANKS, lengths)
    assert (found.steps, found.tokens, found.flops) == (None, None, None)
