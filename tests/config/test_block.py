"""A block that is given is a layer over its default, and a fault names the field that is wrong."""

import re
import tomllib
from operator import attrgetter
from pathlib import Path

import pytest

from rlhf_pipeline.config import block
from rlhf_pipeline.config.block import meant, validated
from rlhf_pipeline.config.policies import DistillConfig, GRPOConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.sample import IterativeDPOConfig, RejectionConfig
from rlhf_pipeline.config.split import ColumnMap
from rlhf_pipeline.pipelines.table import parameter_blocks

TEACHER = {"teacher": "facebook/opt-1.3b"}


@pytest.mark.parametrize(
    ("kind", "given", "kept"),
    [
        (GRPOConfig, {"actor": {"lora": {}}}, ["actor.optimizer"]),
        (GRPOConfig, {"actor": {"optimizer": {"warmup_fraction": 0.1}}},
         ["actor.optimizer.learning_rate"]),
        (GRPOConfig, {"kl": {"maximum": 9.0}}, ["kl.coef", "kl.place"]),
        (DistillConfig, TEACHER | {"actor": {"lora": {}}}, ["actor.optimizer"]),
        (RejectionConfig, {"sample": {"sampling": {"temperature": 0.7}}},
         ["sample.sampling.max_response_tokens"]),
        (IterativeDPOConfig, {"lora": {}}, ["optimizer"]),
    ],
)  # fmt: skip
def test_a_field_that_is_set_leaves_the_published_defaults_beside_it(kind, given, kept):
    published = kind.model_validate(TEACHER if kind is DistillConfig else {})
    found, faults = validated("block", kind, given)
    assert faults == []
    for value in map(attrgetter, kept):
        assert value(found) == value(published)
    assert found != published
    assert kind.model_validate(found.model_dump(mode="json")) == found  # as in job.json


MODEL = {"optimizer": {"learning_rate": 1e-3}}
PPO = {
    "steps": 4, "rollout_batch_size": 12, "micro_batch_tokens": 4, "actor": MODEL, "critic": MODEL,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "given", "fault"),
    [
        (GRPOConfig, {"responses_per_prompt": 7},
         "grpo.responses_per_prompt: found 7, expected a divisor of rollout_batch_size 64. "
         "Fix: use 4 or 8"),
        (GRPOConfig, {"rollout_batch_size": 20},
         "grpo.rollout_batch_size: found 20, expected a multiple of responses_per_prompt 8. "
         "Fix: use 16 or 24"),
        (PPOConfig, PPO | {"minibatch_size": 8},
         "grpo.minibatch_size: found 8, expected a divisor of rollout_batch_size 12. Fix: set it "
         "to null, which is all responses of a step"),
        (GRPOConfig, {"kl": {"maximum": 200}},
         "grpo.kl.explosion: found 100, expected more than maximum 200. Fix: raise it, or set it "
         "to null for no limit"),
    ],
)  # fmt: skip
def test_a_fault_of_two_values_names_the_field_and_its_fix_is_accepted(kind, given, fault):
    assert validated("grpo", kind, given)[1] == [fault]
    place, fix = fault.removeprefix("grpo.").partition(":")[0], fault.partition(" Fix: ")[2]
    for number in re.findall(r"\d+", fix):
        assert validated("grpo", kind, given | {place: int(number)})[1] == []


def test_every_word_of_another_trainer_leads_to_a_parameter():
    """A place that a block has, or a sentence."""
    words = tomllib.loads((Path(block.__file__).parent / "words.toml").read_text())
    blocks = {**parameter_blocks(), "columns": ColumnMap, "root": str}
    for place in {place for places in words.values() for place in places} - words.keys():
        assert " " in place or f"{place}?)" in meant(place, blocks), place


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("dpo.lr", "(did you mean optimizer.learning_rate?)"),
        ("grpo.beta", "(did you mean kl.coef?)"),
        ("ppo.kl.kl_coef", "(did you mean coef?)"),
        ("rejection.num_generations", "(did you mean sample.n?)"),
        ("sft.bf16", "(did you mean deepspeed.precision?)"),
        ("wandb", "; only MLflow tracks runs, and needs no parameter"),
        ("nonsense", ""),
        ("columns.completion",
         "; in columns, it is another name of response. Fix: set one of them"),
    ],
)  # fmt: skip
def test_an_unknown_parameter_may_be_a_word_of_another_trainer(place, said):
    *blocks, word = place.split(".")
    known = {**parameter_blocks(), "columns": ColumnMap}
    for name in blocks:
        (kind,) = block.blocks_in(known[name])
        known = {each: field.annotation for each, field in kind.model_fields.items()}
    assert meant(word, known).strip() == said
