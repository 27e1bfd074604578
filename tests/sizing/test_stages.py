"""Lengths, rows and passes of a step, worked by hand."""

import json

import pytest

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.memory import Lengths, Rows
from rlhf_pipeline.sizing.models import Shape
from rlhf_pipeline.sizing.stages import StageLoad, plan_stage

SHAPE = Shape.of(
    {"model_type": "llama", "hidden_size": 100, "num_hidden_layers": 4, "num_attention_heads": 4,
     "intermediate_size": 400, "vocab_size": 1000, "tie_word_embeddings": True}
)  # fmt: skip
OPTIMIZER = {"optimizer": {"learning_rate": 1e-3}}
SPLIT = {"sources": [{"name": "synthetic"}], "max_prompt_tokens": 30, "max_response_tokens": 20}
RANKS = Hardware(2)
SUPERVISED = OPTIMIZER | {"epochs": 2}
ANSWERS = {"max_response_tokens": 15}


@pytest.mark.parametrize(
    ("stage", "block", "lengths", "rows"),
    [
        # 16 rows of 30 + 20 tokens on each of two ranks, in passes of 300.
        ("sft", SUPERVISED | {"batch_size": 32, "micro_batch_tokens": 300},
         Lengths(30, 20), Rows(passes=3, computed=300, answers=120)),
        # A comparison has its prompt twice and computes it once: 25 rows of 2 * 30 + 40 tokens.
        ("reward_model", SUPERVISED | {"batch_size": 50, "micro_batch_tokens": 5000},
         Lengths(30, 40, copies=2), Rows(passes=1, computed=25 * 70, answers=25 * 40)),
        # A round trains on pairs of its own answers.
        ("iterative_dpo", SUPERVISED | {"rounds": 3, "batch_size": 10, "micro_batch_tokens": 450,
                                        "sample": {"n": 4, "prompts": 50, "sampling": ANSWERS}},
         Lengths(30, 30, copies=2), Rows(passes=1, computed=300, answers=150)),
        ("ppo", {"steps": 5, "rollout_batch_size": 16, "minibatch_size": 8, "ppo_epochs": 2,
                 "micro_batch_tokens": 1000, "sampling": ANSWERS, "actor": OPTIMIZER,
                 "critic": OPTIMIZER},
         Lengths(30, 15), Rows(passes=1, computed=4 * 45, answers=4 * 15)),
    ],
)  # fmt: skip
def test_rows_have_the_greatest_length_and_passes_the_tokens_of_their_budget(
    stage, block, lengths, rows
):
    found = StageLoad.of(stage, {stage: block, "split": SPLIT}, RANKS)
    assert (found.lengths, found.rows) == (lengths, rows)


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
    memory = plan_stage("distill", {"distill": block, "split": SPLIT}, SHAPE, RANKS)
    update = next(phase for phase in memory.phases if phase.name == "update")
    # Half of 16 rows are this rank's, with 20 tokens each.
    assert update.parts["teacher"] == size * (8 * 20 * 200 + (stage == 3) * 1000 * 200)


SMALL = {"model_type": "llama", "hidden_size": 40, "num_hidden_layers": 2, "vocab_size": 500,
         "num_attention_heads": 4, "intermediate_size": 80}  # fmt: skip


def test_reward_model_and_critic_have_the_sizes_of_what_they_start_from(tmp_path):
    """Whole fp32 weights with their gradients and Adam's moments, of the body alone."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    own = {"start": "own", "base_model": {"path": str(tmp_path)}}
    blocks = {
        "split": SPLIT,
        "sft": None,
        "reward_model": SUPERVISED | {"batch_size": 8} | own,
        "ppo": {"steps": 5, "rollout_batch_size": 16, "actor": OPTIMIZER, "critic": OPTIMIZER},
        "evaluate": {},
    }

    def bodies(stage: str, **critic: object) -> list[int]:
        changed = blocks | {"ppo": blocks["ppo"] | {"critic": OPTIMIZER | critic}}
        held = plan_stage(stage, changed, SHAPE, Hardware(1)).models
        return [model.held["weights"] // 4 for model in held if "weights" in model.held]

    small, large = Shape.of(SMALL).body, SHAPE.body
    assert bodies("reward_model") == [pytest.approx(small, abs=100)]
    sizes = [pytest.approx(size, abs=200) for size in (SHAPE.parameters, SHAPE.parameters)]
    assert bodies("ppo") == [*sizes, pytest.approx(small, abs=100), pytest.approx(small, abs=100)]
    from_policy = bodies("ppo", start="policy")
    assert from_policy[2:] == [pytest.approx(large, abs=200), pytest.approx(small, abs=100)]
    first = plan_stage("evaluate", blocks, SHAPE, Hardware(1)).models[0]
    assert first.held["weights"] == 4 * SHAPE.parameters


def test_a_reward_model_on_the_hub_of_unknown_sizes_is_said():
    own = {"start": "own", "base_model": {"path": "someone/unknown"}}
    blocks = {"split": SPLIT, "reward_model": SUPERVISED | {"batch_size": 8} | own}
    message = r"^reward_model\.base_model\.path: found someone/unknown"
    with pytest.raises(ConfigError, match=message):
        plan_stage("reward_model", blocks, SHAPE, Hardware(1))
