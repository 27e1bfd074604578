"""Rows, batches, steps, tokens, operations and disk, worked by hand."""

import json

import pytest

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.memory import Lengths
from rlhf_pipeline.sizing.models import Shape
from rlhf_pipeline.sizing.stages import plan_stage
from rlhf_pipeline.sizing.work import forward_flops, limits, measured, stage_work

SPLIT = SplitConfig.model_validate(
    {"sources": [{"name": "synthetic", "samples": 1000}], "weights": [2, 4, 4],
     "validation_fraction": 0.05, "test_fraction": 0.15, "max_prompt_tokens": 64,
     "max_response_tokens": 48}
)  # fmt: skip


def publish(folder, split):
    artifact = folder / "2026-01-01T00.00.00.000Z" / folder.name
    artifact.mkdir(parents=True)
    columns = {"sft": ["response_ids"], "reward_model": ["chosen_ids", "rejected_ids"], "ppo": []}
    files = {
        f"{phase}/train.arrow": {
            "rows": 100,
            "tokens": {"prompt_ids": {"total": 2000, "max": 30}}
            | {name: {"total": 1500, "max": 40} for name in names},
        }
        for phase, names in columns.items()
    }
    files["kto/train.arrow"] = {"rows": 0, "tokens": {}}
    (artifact / "report.json").write_text(json.dumps({"files": files}))
    config = {"split": split.model_dump(mode="json")}
    Manifest("split", "f" * 64, 1, config, {}, {}, {}, {}).write(artifact)


def test_limits_are_upper_bounds():
    found = limits(SPLIT)
    assert found["sft"] == Lengths(160, 64, 48, 64, 48)  # 1000 * 0.8 * 0.2
    assert found["reward_model"].row == found["reward_model"].longest == 2 * (64 + 48)
    assert found["ppo"].row == 64


def test_rows_without_a_number_of_samples_are_not_known():
    source = {"name": "synthetic", "samples": 5}
    split = SPLIT.model_copy(update={"sources": [*SPLIT.sources, *SPLIT.sources]})
    assert limits(split)["sft"].rows == 320
    other = SplitConfig.model_validate(
        SPLIT.model_dump() | {"sources": [source, {"name": "Anthropic/hh-rlhf"}]}
    )
    assert limits(other)["sft"].rows is None


def test_a_published_split_says_its_own(tmp_path):
    folder = tmp_path / "split"
    assert measured(folder, SPLIT) is None
    publish(folder, SPLIT)
    found = measured(folder, SPLIT)
    assert found["sft"] == Lengths(100, 20, 15, 30, 40)
    assert found["reward_model"] == Lengths(100, 20, 30, 30, 80, copies=2)
    assert found["ppo"] == Lengths(100, 20, 0, 30, 0)


def test_a_phase_without_rows_has_the_limits_of_its_parameters(tmp_path):
    """Weight 0, for example without PPO: the report has neither rows nor tokens."""
    folder = tmp_path / "split"
    publish(folder, SPLIT)
    (report,) = folder.rglob("report.json")
    found = json.loads(report.read_text())
    found["files"]["ppo/train.arrow"] = {"rows": 0, "tokens": {}}
    report.write_text(json.dumps(found))
    lengths = measured(folder, SPLIT)
    assert lengths["sft"] == Lengths(100, 20, 15, 30, 40)
    assert lengths["ppo"] == limits(SPLIT)["ppo"]


def test_a_split_of_other_parameters_does_not_count(tmp_path):
    publish(tmp_path / "split", SPLIT)
    other = SPLIT.model_copy(update={"max_prompt_tokens": 32})
    assert measured(tmp_path / "split", other) is None


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
    block |= {} if stage in ("ppo", "distill") else OPTIMIZER
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


def test_rounds_answer_and_train():
    """Each prompt has a pair of answers of the greatest length."""
    sample = {"n": 4, "prompts": 50, "sampling": {"max_response_tokens": 20}}
    found = work("iterative_dpo", rounds=3, epochs=1, batch_size=10, sample=sample)
    assert found.steps == 3 * 5
    assert found.tokens == 3 * 50 * 2 * (30 + 20)
    training = 4 * forward_flops(SHAPE, 3 * 50 * 100, 50)  # the reference, too
    assert found.flops == training + 2 * forward_flops(SHAPE, 3 * 4 * 50 * 50, 50)


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


TEACHER = {"model_type": "llama", "hidden_size": 200, "num_hidden_layers": 8, "vocab_size": 1000,
           "num_attention_heads": 4, "intermediate_size": 800}  # fmt: skip


def test_a_distillation_has_a_forward_pass_of_the_teacher(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TEACHER))
    found = work(
        "distill", teacher=str(tmp_path), steps=5, rollout_batch_size=16, minibatch_size=16,
        sampling={"max_response_tokens": 20},
    )  # fmt: skip
    own, teacher = (forward_flops(each, 5 * 16 * 50, 50) for each in (SHAPE, Shape.of(TEACHER)))
    assert teacher > 6 * own
    assert found.flops == pytest.approx((1 + 3) * own + teacher)  # the sampler knows its log-probs
    assert found.saved_models == 3 * 4 * WEIGHTS  # the teacher is not saved


@pytest.mark.parametrize(("stage", "precision", "size"), [(0, "fp32", 4), (3, "bf16", 2)])
def test_what_a_teacher_knows_stays_until_the_student_has_learned_it(
    tmp_path, stage, precision, size
):
    """Its last hidden states, and its output layer of 1000 * 200 weights if it is sharded."""
    (tmp_path / "config.json").write_text(json.dumps(TEACHER))
    block = {
        "teacher": str(tmp_path), "rollout_batch_size": 16, "minibatch_size": 16,
        "sampling": {"max_response_tokens": 20},
        "reference": {"deepspeed": {"zero_stage": stage, "precision": precision}},
    }  # fmt: skip
    memory = plan_stage("distill", {"distill": block}, SHAPE, RANKS, LENGTHS)
    update = next(phase for phase in memory.phases if phase.name == "update")
    # Half of 16 rows are this rank's, with 20 tokens each.
    assert update.parts["teacher"] == size * (8 * 20 * 200 + (stage == 3) * 1000 * 200)


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
