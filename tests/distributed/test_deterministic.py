"""`launch.deterministic`: torch adds in a fixed order in optimizer steps, and only there."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from ppo_runs import ppo_config, run_ppo
from rank_lab import ON_GPU
from transformers import AutoModelForCausalLM, LlamaConfig

from rlhf_pipeline.distributed.optimizer_step import optimizer_step
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.generation import decoding
from rlhf_pipeline.models.packing import use_packed_attention
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.runtime.program import DETERMINISTIC
from rlhf_pipeline.training import ppo_update

is_on = torch.are_deterministic_algorithms_enabled


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_mode_is_on_in_forward_and_backward_passes_and_off_after_them(deterministic):
    weight, modes = torch.ones(3, requires_grad=True), []

    def backward(loss):
        loss.register_hook(lambda grad: modes.append(is_on()))
        loss.backward()

    def loss():
        modes.append(is_on())
        return weight.sum(), {}

    engine, world = Mock(backward=backward), Mock(size=1, deterministic=deterministic)
    optimizer_step(engine, world, [loss, loss])
    assert modes == [deterministic] * 4 and not is_on()
    with pytest.raises(ZeroDivisionError):
        optimizer_step(engine, world, [lambda: 1 / 0])
    assert not is_on()


def test_ppo_learns_in_the_mode_and_samples_outside_of_it(ppo_inputs, world, tmp_path, monkeypatch):
    """On a GPU, the sampler's cumulative sum raises in this mode."""
    modes = {"sampled": set(), "actor_loss": set(), "critic_loss": set()}

    def watched(module, name):
        own = getattr(module, name)

        def call(*arguments, **options):
            modes[name].add(is_on())
            return own(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    watched(decoding, "sampled")
    watched(ppo_update, "actor_loss")
    watched(ppo_update, "critic_loss")
    config = ppo_config(steps=1, evaluations=1)
    run_ppo(config, ppo_inputs, replace(world, deterministic=True), tmp_path)
    assert modes == {"sampled": {False}, "actor_loss": {True}, "critic_loss": {True}}


def test_a_rank_learns_it_from_its_environment(world, monkeypatch):
    monkeypatch.delenv(DETERMINISTIC, raising=False)
    assert not join(0, timeout_s=60).deterministic
    monkeypatch.setenv(DETERMINISTIC, "1")
    assert join(0, timeout_s=60).deterministic


CASES = {"bf16": ("bfloat16",), "fp32": ("float32",)}


def case(lab, dtype):
    """Whether the gradient of four rows of 1,024 tokens is the same three times."""
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, pad_token_id=0,
    )  # fmt: skip
    device, prompts = lab.world.device, torch.randint(1, 512, (4, 512)).tolist()
    rows = collate(prompts, torch.randint(1, 512, (4, 512)).tolist(), 0).to(device).packed()
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).to(device)
    use_packed_attention(model)

    def loss():
        return model(**rows.model_inputs(), use_cache=False).logits.float().square().mean(), {}

    engine, gradients = Mock(backward=torch.Tensor.backward), []
    for _ in range(3):
        model.zero_grad()
        optimizer_step(engine, replace(lab.world, deterministic=True), [loss, loss])
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    return all(
        torch.equal(one, other)
        for again in gradients[1:]
        for one, other in zip(gradients[0], again, strict=True)
    )


@pytest.mark.parametrize("name", [pytest.param(name, marks=ON_GPU) for name in CASES])
def test_a_gpu_repeats_the_gradient_of_long_rows(cells, name):
    assert cells[name]
