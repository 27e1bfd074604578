"""Liger's kernels in Triton's interpreter, and layers that torch compiles, beside plain ones."""

import copy
import importlib
import os
import random
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_pipeline.config.training import TrainedModelConfig
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.distributed.zero import for_generation
from rlhf_pipeline.errors import ConfigError, StageError
from rlhf_pipeline.models import AttentionInterface, forward
from rlhf_pipeline.models.forward import install_logprob_head, response_logprobs
from rlhf_pipeline.models.kernels import use_kernels
from rlhf_pipeline.models.loading import DTYPES, load_policy
from rlhf_pipeline.models.packing import PACKED, use_packed_attention
from rlhf_pipeline.models.sequences import collate

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.2,
}  # fmt: skip
CPU = torch.device("cpu")
ROWS = collate(
    [[5, 6, 7], [5, 6, 7], [9, 9]], [[10, 11, 12], [13, 14], [15, 16, 17, 18]], 0,
    prompt_numbers=[0, 0, 1],
)  # fmt: skip


def results(model, batch):
    """Log-probabilities of real tokens, and the gradients of all weights that train."""
    found = response_logprobs(model, batch, vocab_size=288)[batch.real_mask]
    weights = {name: x for name, x in model.named_parameters() if x.requires_grad}
    scale = torch.arange(len(found)).sin()
    grads = torch.autograd.grad(found, list(weights.values()), scale)
    return {"log-probabilities": found.detach(), **dict(zip(weights, grads, strict=True))}


@pytest.fixture
def liger(monkeypatch):
    """Triton's interpreter, with the three things that it lacks: floats, rsqrt and tanh."""
    pytest.importorskip("liger_kernel", reason="the extra `liger` is not installed: `make liger`")
    if os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads it when it is imported
        pytest.skip("TRITON_INTERPRET=1 is not set: `make liger`")
    from liger_kernel.ops import geglu, rms_norm
    from triton import language as tl
    from triton.runtime import interpreter

    def converted(value, known=interpreter._implicit_cvt):
        if not isinstance(value, float):
            return known(value)
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))
    monkeypatch.setattr(geglu, "tanh", lambda x: 2 / (1 + tl.exp(-2 * x)) - 1)
    families = [f"transformers.models.{name}.modeling_{name}" for name in FAMILIES]
    plain = {name: dict(vars(importlib.import_module(name))) for name in families}
    yield
    for name, known in plain.items():
        vars(sys.modules[name]).update(known)


FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"},
}


@pytest.fixture(params=FAMILIES)
def model(request):
    fields = SIZES | FAMILIES[request.param]
    config = AutoConfig.for_model(request.param, **fields, vocab_size=300, pad_token_id=0)
    torch.manual_seed(1)
    made = AutoModelForCausalLM.from_config(config)
    install_logprob_head(made)
    use_packed_attention(made)
    return made


def test_ligers_kernels_compute_what_torch_computes(liger, model):
    """Rows share a prompt, so positions do not grow with the place; names and head stay."""
    names, expected = list(model.state_dict()), results(model, ROWS)
    assert forward.probe_capabilities(model).packed
    use_kernels(model, "liger", "fp32", CPU)
    found = results(model, ROWS)
    assert repr(model).count("LigerRMSNorm") > 1 and "Liger" in repr(model.model.layers[0].mlp)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert list(model.state_dict()) == names
    assert isinstance(model.get_output_embeddings(), forward.LogprobHead)
    later = type(model)(model.config)
    assert "Liger" not in repr(later) and list(later.state_dict()) == names


def wrong_gate(kernel, factor):
    """An activation of a gate that is too large or too small."""
    return SimpleNamespace(apply=lambda gate, *others: kernel.apply(factor * gate, *others))


def wrong_positions(rope):
    """A rotary embedding of the position before."""
    return lambda q, k, cos, sin, *others: rope(q, k, cos.roll(1, 1), sin.roll(1, 1), *others)


@pytest.mark.parametrize(
    ("model", "precision", "place", "name", "wrong"),
    [
        ("llama", "fp32", "swiglu", "LigerSiLUMulFunction", partial(wrong_gate, factor=1.001)),
        ("gemma2", "fp16", "geglu", "LigerGELUMulFunction", partial(wrong_gate, factor=1.2)),
        ("qwen3", "fp16", "monkey_patch", "liger_rotary_pos_emb", wrong_positions),
    ],
    indirect=["model"],
)
def test_a_wrong_kernel_is_refused_and_no_other(
    liger, model, monkeypatch, precision, place, name, wrong
):
    """Triton's interpreter has no bf16."""
    model = model.to(DTYPES[precision])
    use_kernels(copy.deepcopy(model), "liger", precision, CPU)
    module = importlib.import_module(f"liger_kernel.transformers.{place}")
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    with pytest.raises(StageError, match=rf"Liger in a .* in {precision} on the CPU .*an error of"):
        use_kernels(model, "liger", precision, CPU)


def test_a_family_that_liger_does_not_know_is_refused(liger):
    unknown = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1))
    message = "found liger for a model of type gpt2, expected a family"
    with pytest.raises(ConfigError, match=message):
        use_kernels(unknown, "liger", "fp32", CPU)


@pytest.fixture
def traced(monkeypatch):
    """torch.compile without the C++ compiler; returns the number of graphs so far."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    interface = AttentionInterface()
    monkeypatch.setitem(type(interface)._global_mapping, PACKED, interface[PACKED])
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def batches(count):
    """Packed rows whose number, lengths and shared prompts differ from batch to batch."""
    draw = random.Random(1)

    def tokens(most):
        return [draw.randint(2, 250) for _ in range(draw.randint(2, most))]

    for _ in range(count):
        share = draw.choice([1, 1, 2, 3])
        prompts = [tokens(40) for _ in range(draw.randint(2, 6))]
        numbers = [i for i in range(len(prompts)) for _ in range(share)]
        rows = [prompts[i] for i in numbers]
        yield collate(rows, [tokens(60) for _ in rows], 0, prompt_numbers=numbers)


@pytest.mark.slow
def test_compiled_layers_compute_the_same_in_few_graphs(make_model, world, traced):
    """Adapters and checkpointed activations at ZeRO-2. Two parts of a layer and their backward
    passes are graphs; further lengths, rows and shared prompts add none."""
    fields = {
        "optimizer": {"learning_rate": 1e-3}, "gradient_checkpointing": True, "lora": {"rank": 4},
    }  # fmt: skip
    load = partial(load_policy, make_model("qwen2"))
    engine, other = (
        train_engine(load, TrainedModelConfig.model_validate(fields | {"deepspeed": how}), 2)
        for how in ({"zero_stage": 2, "kernels": "compile"}, {"zero_stage": 2})
    )
    other.module.load_state_dict(engine.module.state_dict())  # the same adapters and names
    for batch in batches(20):
        found, expected = (results(each.module, batch) for each in (engine, other))
        for name, value in expected.items():
            near = max(1e-5, 1e-6 * float(value.abs().max()))  # sums have another order
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=near, msg=name)
    assert traced() == 4
    with torch.no_grad():
        graphs = []
        for batch in batches(10):
            response_logprobs(engine, batch, vocab_size=288)
            graphs.append(traced())
        assert graphs[0] == graphs[-1] > 4
        with for_generation(engine) as policy:
            policy(input_ids=torch.tensor([[5, 6], [7, 8]]))
        assert traced() == graphs[-1]


def test_a_model_without_known_layers_is_not_compiled():
    unknown = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=0))
    message = "compile for a model of type gpt2, .* null, for a frozen model"
    with pytest.raises(ConfigError, match=message):
        use_kernels(unknown, "compile", "fp32", CPU)
