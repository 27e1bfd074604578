"""What vLLM is asked for, with a stand-in for vLLM. `test_vllm_generator.py` has vLLM itself."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.rollout.vllm_generator import load_engine

TOO_FEW = (
    "To serve at least one request with the model's max seq len (62), (0.01 GiB KV cache is "
    "needed, which is larger than the available KV cache memory (0.0 GiB). Try increasing "
    "`gpu_memory_utilization`"
)


@pytest.fixture
def vllm(monkeypatch):
    """A package vllm; returns the options and the environment that it got, and a fault to raise."""
    seen = SimpleNamespace(options={}, environment={}, fault=None)
    settings = SimpleNamespace(
        model_config=SimpleNamespace(using_transformers_backend=lambda: False)
    )

    def arguments(**options):
        seen.options, seen.environment = options, dict(os.environ)
        return SimpleNamespace(create_engine_config=lambda: settings)

    def engine(config, **options):
        if seen.fault is not None:
            raise seen.fault
        return SimpleNamespace(
            engine_core=SimpleNamespace(_finalizer=SimpleNamespace(detach=lambda: None))
        )

    module = ModuleType("vllm")
    module.EngineArgs, module.LLMEngine = arguments, SimpleNamespace(from_vllm_config=engine)
    monkeypatch.setitem(sys.modules, "vllm", module)
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "VLLM_USE_FLASHINFER_SAMPLER"):
        monkeypatch.setenv(name, "")  # so that the test's end restores it
        monkeypatch.delenv(name)
    return seen


def load(rows=2):
    model = SimpleNamespace(config=LlamaConfig(), dtype=torch.bfloat16)
    return load_engine(
        model, SimpleNamespace(vocab_size=288), rows, 62, "ppo.generator", sleeps=True
    )


def test_the_output_layer_computes_in_float32(vllm):
    load()
    assert vllm.options["dtype"] == "bfloat16"
    assert vllm.options["hf_overrides"] == {"head_dtype": "float32"}


def test_no_sampler_is_compiled_unless_the_user_asks_for_it(vllm, monkeypatch):
    load()
    assert vllm.environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    load()
    assert vllm.environment["VLLM_USE_FLASHINFER_SAMPLER"] == "1"


def test_an_engine_that_vllm_does_not_make_is_a_fault_of_the_configuration(vllm):
    """As with layers that have a window beside others that have none: each kind needs pages."""
    vllm.fault = ValueError(TOO_FEW)
    with pytest.raises(
        ConfigError,
        match=r"ppo\.generator: vLLM makes no engine for 2 rows of 62 tokens by this llama: To "
        r"serve at least .* \(0\.0 GiB\)\. Fix: set it to transformers",
    ):
        load()
