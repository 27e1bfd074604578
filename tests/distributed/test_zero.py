"""How models are held for inference and for generation, on one rank in this process."""

from functools import partial

import numpy as np
import pytest
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from rlhf_pipeline.config.ppo import SamplingConfig
from rlhf_pipeline.config.training import FrozenModelConfig, TrainedModelConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.engine import frozen_model, train_engine
from rlhf_pipeline.distributed.zero import for_generation, is_sharded
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.rollout.generation import generate, uniform_draws


def block(**fields) -> TrainedModelConfig:
    return TrainedModelConfig.model_validate({"optimizer": {"learning_rate": 1e-3}} | fields)


@pytest.fixture(scope="module")
def policy(make_model):
    return make_model("llama")


def test_a_frozen_model_has_an_engine_only_where_it_is_sharded(policy, world):
    """An engine of stage 0 would have an optimizer that nobody asked for; stages 1 and 2 cannot be without one."""
    load = partial(load_policy, policy)
    whole = frozen_model(load, FrozenModelConfig(), block(deepspeed={"zero_stage": 2}), world)
    sharded = frozen_model(load, FrozenModelConfig(), block(deepspeed={"zero_stage": 3}), world)
    assert not isinstance(whole, DeepSpeedEngine) and not is_sharded(whole)
    assert isinstance(sharded, DeepSpeedEngine) and is_sharded(sharded)
    assert isinstance(sharded.optimizer, DeepSpeedZeRoOffload) and sharded.lr_scheduler is None
    assert not any(
        parameter.requires_grad for model in (whole, sharded) for parameter in model.parameters()
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_generation_keeps_its_cache_where_activations_are_not_kept(policy, world, stage):
    """After the prompts, each forward pass reads one new token, and has the others in its cache: the responses are those of
    the model without an engine. In training mode, layers that keep no activations keep no cache either."""
    engine = train_engine(
        partial(load_policy, policy),
        block(deepspeed={"zero_stage": stage}, gradient_checkpointing=True),
        1,
    )
    contract, draws = TokenContract.read(policy), uniform_draws(1, 1, np.arange(2), 6)
    widths = []
    with for_generation(engine) as module:
        hook = module.register_forward_pre_hook(
            lambda m, args, kw: widths.append(kw["input_ids"].shape[1]), with_kwargs=True
        )
        found = generate(
            module, [[5, 6, 7], [8]], draws, SamplingConfig(max_response_tokens=6), contract
        )
    hook.remove()
    plain = load_policy(policy, "fp32").eval()
    expected = generate(
        plain, [[5, 6, 7], [8]], draws, SamplingConfig(max_response_tokens=6), contract
    )
    assert torch.equal(found.response_ids, expected.response_ids)
    assert widths == [3] + [1] * (len(widths) - 1) and len(widths) > 2
    assert engine.module.training


def test_generation_leaves_training_mode_and_shards_as_they_were_when_it_fails(policy, world):
    engine = train_engine(partial(load_policy, policy), block(deepspeed={"zero_stage": 3}), 1)
    hooks = sum(len(module._forward_hooks) for module in engine.module.modules())
    assert hooks > 0
    with pytest.raises(KeyError), for_generation(engine) as module:
        assert not module.training and module.lm_head.weight.numel() > 0
        raise KeyError
    assert engine.module.training and engine.module.lm_head.weight.numel() == 0
    assert sum(len(module._forward_hooks) for module in engine.module.modules()) == hooks


def test_a_checkpoint_s_own_sampling_habits_are_not_inherited(policy, make_model):
    """transformers fills settings that are not given from the checkpoint's file, and a file may say anything."""
    habits = make_model("llama")  # the same weights
    (habits / "generation_config.json").write_text(
        '{"do_sample": true, "top_k": 1, "repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "suppress_tokens": [1]}'
    )
    contract, draws = TokenContract.read(policy), uniform_draws(1, 1, np.arange(8), 12)
    sampling = SamplingConfig(max_response_tokens=12, temperature=0.2)
    ours, theirs = (
        generate(load_policy(path, "fp32").eval(), [[5, 6]] * 8, draws, sampling, contract)
        for path in (policy, habits)
    )
    assert torch.equal(ours.response_ids, theirs.response_ids)
