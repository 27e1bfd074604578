"""A copy sharded over two ranks answers as the actor itself does, at any ZeRO stage."""

import gc
from functools import partial

import numpy as np
import pytest
import torch
from ppo_runs import ppo_config

from rlhf_pipeline.config.training import HybridConfig, SamplingConfig, TrainedModelConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.distributed.optimizer_step import optimizer_step
from rlhf_pipeline.errors import ConfigError, StageError
from rlhf_pipeline.generation.generator import row_seeds
from rlhf_pipeline.generation.hybrid_generator import HybridGenerator, styles
from rlhf_pipeline.generation.transformers_generator import TransformersGenerator
from rlhf_pipeline.models.forward import response_logprobs
from rlhf_pipeline.models.loading import load_policy

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15], [16], [17, 18]]
SAMPLING = SamplingConfig(max_response_tokens=12, batch_size_per_gpu=2)
CASES = {
    "llama, ZeRO 0": ("llama", {"deepspeed": {"zero_stage": 0}}, {}),
    "llama, ZeRO 3": ("llama", {"deepspeed": {"zero_stage": 3}}, {"tp_gather_partition_size": 1}),
    "qwen2, ZeRO 2": ("qwen2", {"deepspeed": {"zero_stage": 2}}, {"pin_parameters": False}),
    "qwen3, LoRA, ZeRO 3": ("qwen3", {"deepspeed": {"zero_stage": 3}, "lora": {"rank": 4}}, {}),
    "gpt_neox, ZeRO 1": ("gpt_neox", {"deepspeed": {"zero_stage": 1}}, {}),
}


def rollouts(checkpoint, world, model, options):
    """Tokens and the gap of log-probabilities, before and after an optimizer step."""
    config = TrainedModelConfig.model_validate({"optimizer": {"learning_rate": 1e-2}} | model)
    engine = train_engine(partial(load_policy, checkpoint), config, 2)
    contract = TokenContract.read(checkpoint)
    hybrid = HybridGenerator(
        engine, contract, HybridConfig(inference_tp_size=world.size, **options), world
    )
    plain = TransformersGenerator(engine, contract)
    own = slice(world.rank, None, world.size)
    seeds = row_seeds(1, 1, np.arange(len(PROMPTS)))[own]
    found = []
    for _ in range(2):
        one, other = (g.generate(PROMPTS[own], SAMPLING, seeds) for g in (hybrid, plain))
        same = torch.equal(one.sequences.response_ids, other.sequences.response_ids)
        gap = float((one.logprobs - other.logprobs).abs().max()) if same else None
        found.append([one.sequences.response_ids.tolist(), same, gap])

        def loss(batch=other.sequences):
            logprobs = response_logprobs(engine, batch, vocab_size=contract.vocab_size)
            return -logprobs.where(batch.action_mask, 0.0).mean(), {}

        optimizer_step(engine, world, [loss])
    return found


def case(lab, family, model, options):
    return lab.world.gather(rollouts(lab.models[family], lab.world, model, options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.long) if x.endswith(("0", "1")) else x for x in CASES],
)
def test_a_sharded_copy_samples_what_the_actor_samples(cells, name):
    for before, after in cells[name]:
        assert before[1] and after[1]
        assert max(before[2], after[2]) < 1e-5
        assert before[0] != after[0]  # the step has moved the actor, and the copy followed


@pytest.fixture
def engine(make_model, world):
    config = TrainedModelConfig.model_validate({"optimizer": {"learning_rate": 1e-2}})
    return train_engine(partial(load_policy, make_model("llama")), config, 2)


def test_ranks_that_form_no_groups_are_refused(engine, make_model, world):
    contract = TokenContract.read(make_model("llama"))
    with pytest.raises(StageError, match=r"found 2, expected a divisor of the 1 ranks"):
        HybridGenerator(engine, contract, HybridConfig(inference_tp_size=2), world)


@pytest.mark.parametrize(("pinned", "copies"), [(True, 1), (False, 0)])
def test_a_copy_that_is_not_pinned_leaves_no_weights(engine, make_model, world, pinned, copies):
    """Without a garbage collection: the update needs the memory."""

    def weights():
        found = [x for x in gc.get_objects() if isinstance(x, torch.nn.Parameter)]
        return len([weight for weight in found if weight.device.type != "meta"])

    gc.collect()
    gc.disable()
    try:
        before, contract = weights(), TokenContract.read(make_model("llama"))
        generator = HybridGenerator(engine, contract, HybridConfig(pin_parameters=pinned), world)
        for _ in range(2):
            generator.generate(PROMPTS, SAMPLING, row_seeds(1, 1, np.arange(len(PROMPTS))))
        assert weights() - before == copies * len([*engine.module.parameters()])
    finally:
        gc.enable()


def test_auto_takes_the_copy_if_ranks_share_it():
    def chosen(**changes):
        return ppo_config(**changes).model_dump()["generator"]

    assert chosen() == "auto"  # the ranks choose
    assert chosen(hybrid={"inference_tp_size": 2}) == "hybrid"
    assert chosen(generator="hybrid") == "hybrid"
    assert chosen(generator="transformers", hybrid={"inference_tp_size": 2}) == "transformers"


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("gpt2", 2, "gpt2 has no tensor-parallel plan in transformers. Fix: set it to 1"),
        # 4 heads, 2 of keys and values: each matrix could be divided, and half a head be left.
        ("qwen2", 4, "found 4, expected a divisor of the 2 heads of keys and values of this qwen2. "
         "Fix: set it to 2"),
    ],
)  # fmt: skip
def test_a_family_or_a_number_of_ranks_that_allows_no_copy_is_refused(
    make_model, family, size, message
):
    with pytest.raises(ConfigError) as refused:
        styles(load_policy(make_model(family), "fp32"), size)
    assert str(refused.value) == f"hybrid.inference_tp_size: {message}"
