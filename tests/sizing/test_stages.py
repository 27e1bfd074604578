"""Lengths, rows and passes of a step, worked by hand."""

import json

import pytest

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.memory import Lengths, Rows
from rlhf_pipeline.sizing.models import Shape
from rlhf_pipeline.sizing.stages import Load, limits, measured, plan_stage

SPLIT = SplitConfig.model_validate(
    {"sources": [{"name": "synthetic"}], "max_prompt_tokens": 64, "max_response_tokens": 48}
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
    assert found["sft"] == found["kto"] == Lengths(64, 48, 64, 48)
    assert found["reward_model"].row == found["reward_model"].longest == 2 * (64 + 48)
    assert found["ppo"].row == 64


def test_a_published_split_says_its_own(tmp_path):
    folder = tmp_path / "split"
    assert measured(folder, SPLIT) is None
    publish(folder, SPLIT)
    found = measured(folder, SPLIT)
    assert found["sft"] == Lengths(20, 15, 30, 40)
    assert found["reward_model"] == Lengths(20, 30, 30, 80, copies=2)
    assert found["ppo"] == Lengths(20, 0, 30, 0)


def test_a_phase_without_rows_has_the_limits_of_its_parameters(tmp_path):
    """Weight 0, for example without PPO: the report has neither rows nor tokens."""
    folder = tmp_path / "split"
    publish(folder, SPLIT)
    (report,) = folder.rglob("report.json")
    found = json.loads(report.read_text())
    found["files"]["ppo/train.arrow"] = {"rows": 0, "tokens": {}}
    report.write_text(json.dumps(found))
    lengths = measured(folder, SPLIT)
    assert lengths["sft"] == Lengths(20, 15, 30, 40)
    assert lengths["ppo"] == limits(SPLIT)["ppo"]


def test_a_split_of_other_parameters_does_not_count(tmp_path):
    publish(tmp_path / "split", SPLIT)
    other = SPLIT.model_copy(update={"max_prompt_tokens": 32})
    assert measured(tmp_path / "split", other) is None


SHAPE = Shape.of(
    {"model_type": "llama", "hidden_size": 100, "num_hidden_layers": 4, "num_attention_heads": 4,
     "intermediate_size": 400, "vocab_size": 1000, "tie_word_embeddings": True}
)  # fmt: skip
OPTIMIZER = {"optimizer": {"learning_rate": 1e-3}}
LENGTHS = {
    "sft": Lengths(30, 20, 40, 60),
    "reward_model": Lengths(30, 40, 40, 120, copies=2),
    "ppo": Lengths(30, 0, 40, 0),
}
RANKS = Hardware(2)


def load(stage, **block):
    block |= {} if stage in ("ppo", "distill") else OPTIMIZER
    return Load.of(stage, {stage: block}, RANKS, LENGTHS)


def test_micro_batches_hold_the_tokens_of_their_budget():
    """16 rows of 30 + 20 tokens on each of two ranks, in passes of 300."""
    found = load("sft", epochs=2, batch_size=32, micro_batch_tokens=300)
    assert found.rows == Rows(passes=3, computed=300, answers=120)


def test_a_comparison_has_its_prompt_twice_and_computes_it_once():
    """25 rows of 2 * 30 + 40 tokens on a rank."""
    found = load("reward_model", epochs=1, batch_size=50, micro_batch_tokens=5000)
    assert found.rows == Rows(passes=1, computed=25 * (30 + 40), answers=25 * 40)


def test_a_round_trains_on_pairs_of_the_greatest_length():
    sample = {"n": 4, "prompts": 50, "sampling": {"max_response_tokens": 20}}
    found = load("iterative_dpo", rounds=3, epochs=1, batch_size=10, sample=sample)
    assert found.lengths == Lengths(30, 40, 40, 40, copies=2)


def test_ppo_answers_with_the_greatest_length():
    found = load(
        "ppo",
        steps=5, rollout_batch_size=16, minibatch_size=8, micro_batch_tokens=1000, ppo_epochs=2,
        sampling={"max_response_tokens": 20}, actor=OPTIMIZER, critic=OPTIMIZER,
    )  # fmt: skip
    assert found.rows == Rows(passes=1, computed=4 * 50, answers=4 * 20)


TEACHER = {"model_type": "llama", "hidden_size": 200, "num_hidden_layers": 8, "vocab_size": 1000,
           "num_attention_heads": 4, "intermediate_size": 800}  # fmt: skip


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
