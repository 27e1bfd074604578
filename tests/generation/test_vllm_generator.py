"""vLLM in the training processes: its copy follows the actor, at any ZeRO stage and on every rank.

`test_generators.py` has what every generator promises. All of it needs vLLM: `make vllm`.
"""

import json
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from ppo_runs import ppo_config, run_ppo

from rlhf_pipeline.config.training import HybridConfig, SamplingConfig, TrainedModelConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.distributed.optimizer_step import optimizer_step
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.errors import ConfigError, StageError
from rlhf_pipeline.generation import vllm_generator
from rlhf_pipeline.generation.generator import row_seeds
from rlhf_pipeline.generation.vllm_generator import VLLMGenerator
from rlhf_pipeline.models.forward import response_logprobs
from rlhf_pipeline.models.loading import freeze, load_policy

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm: make vllm")

HEADS = {"hidden_size": 64, "num_attention_heads": 2}
"""Heads of 32 numbers, the smallest that vLLM has on a CPU."""
FAMILIES = {
    "llama": HEADS,
    "mistral": HEADS,
    "qwen2": HEADS,
    "qwen3": HEADS | {"head_dim": 32},
    "opt": HEADS,
    "gpt2": {"n_embd": 64, "n_head": 2},
    "bloom": {"hidden_size": 64, "n_head": 2},
}
REFUSED = {"gpt_neox": HEADS}
PAGE = 32
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15], [*range(20, 70)], [*range(20, 66)]]
"""The last two begin with the same page."""
SAMPLING = SamplingConfig(max_response_tokens=12, batch_size_per_gpu=2)
SEEDS = row_seeds(1, 1, np.arange(len(PROMPTS)))
CASES = {
    "llama, ZeRO 0": ("llama", {"deepspeed": {"zero_stage": 0}}),
    "llama, ZeRO 3": ("llama", {"deepspeed": {"zero_stage": 3}}),
    "qwen2, ZeRO 2": ("qwen2", {"deepspeed": {"zero_stage": 2}}),
    "qwen3, LoRA, ZeRO 3": ("qwen3", {"deepspeed": {"zero_stage": 3}, "lora": {"rank": 4}}),
    "llama, bf16": ("llama", {"deepspeed": {"zero_stage": 1, "precision": "bf16"}}),
    "llama, bf16, ZeRO 3": ("llama", {"deepspeed": {"zero_stage": 3, "precision": "bf16"}}),
    **{f"{family}, split, ZeRO 3": (family, {"deepspeed": {"zero_stage": 3}})
       for family in FAMILIES},
}  # fmt: skip
RUNS = {"PPO at ZeRO 0": (0, 1), "PPO at ZeRO 3": (3, 1), "PPO at ZeRO 3, split": (3, 2)}
"""The ZeRO stage of each, and the ranks that hold a copy together."""
ON_A_GPU = "llama, bf16, ZeRO 3"


def options(world, stage="ppo"):
    return {"place": f"{stage}.generator", "world": world, "hybrid": None}


def gap(rollout, policy, contract):
    """The largest distance of a log-probability to that of the policy's own forward pass."""
    sequences = rollout.sequences.to(policy.device)
    with torch.no_grad():
        own = response_logprobs(policy, sequences, vocab_size=contract.vocab_size).cpu()
    mask = rollout.sequences.action_mask
    return float((rollout.logprobs[mask] - own[mask]).abs().max())


def rollouts(case, models, world):
    """Log-probabilities and their gap, before and after an optimizer step."""
    family, model = CASES[case]
    config = TrainedModelConfig.model_validate({"optimizer": {"learning_rate": 1e-2}} | model)
    engine = train_engine(partial(load_policy, models[family]), config, 2)
    contract = TokenContract.read(models[family])
    hybrid = HybridConfig(inference_tp_size=world.size if "split" in case else 1)
    generator = VLLMGenerator(
        engine, contract, rows=2, longest=62, place="ppo.generator", world=world, hybrid=hybrid
    )
    own = slice(world.rank, None, world.size)
    found = []
    for _ in range(2):
        rollout = generator.generate(PROMPTS[own], SAMPLING, SEEDS[own])
        found.append([rollout.logprobs.tolist(), gap(rollout, engine, contract)])

        sequences = rollout.sequences.to(engine.device)

        def loss(batch=sequences):
            logprobs = response_logprobs(engine, batch, vocab_size=contract.vocab_size)
            return -logprobs.where(batch.action_mask, 0.0).mean(), {}

        optimizer_step(engine, world, [loss])
    return found


def main(argument, folder):
    world = join(1, timeout_s=600)
    vllm_generator.PAGE = PAGE
    models, inputs = ({key: Path(path) for key, path in own.items()} for own in argument[:2])
    found = {}
    for name in argument[2]:
        if name in CASES:
            found[name] = rollouts(name, models, world)
            continue
        stage, ranks = RUNS[name]
        model = ppo_config().actor.model_dump() | {"deepspeed": {"zero_stage": stage}}
        options = {"generator": "vllm", "hybrid": {"inference_tp_size": ranks}}
        config = ppo_config(steps=3, actor=model, critic=model, **options)
        found[name] = run_ppo(config, inputs, world, folder / name).lines
    (folder / f"{world.rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def two_ranks(make_model, make_ppo_inputs, on_ranks):
    """What each rank found. A process has one size of vLLM's groups, so there are two launches."""
    models = {family: make_model(family, 3, **FAMILIES[family]) for family, _ in CASES.values()}
    inputs = make_ppo_inputs(make_model("llama", 1, **HEADS))
    found = [{}, {}]
    for is_split in (False, True):
        names = [name for name in (*CASES, *RUNS) if ("split" in name) == is_split]
        folder = on_ranks(__file__, [models, inputs, names])
        for rank, own in enumerate(found):
            own |= json.loads((folder / f"{rank}.json").read_text())
    return found


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_engine_of_each_rank_has_the_weights_of_the_actor(two_ranks, case):
    for before, after in (found[case] for found in two_ranks):
        assert max(before[1], after[1]) < (0.2 if "bf16" in case else 1e-5)
        assert before[0] != after[0]  # the step has moved the actor, and the copy followed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_engine_that_slept_on_a_gpu_has_the_weights_of_the_actor(make_model, on_ranks):
    models = {"llama": make_model("llama", 3, **HEADS)}
    ranks = min(2, torch.cuda.device_count())
    folder = on_ranks(__file__, [models, {}, [ON_A_GPU]], ranks=ranks, accelerator="cuda")
    for rank in range(ranks):
        before, after = json.loads((folder / f"{rank}.json").read_text())[ON_A_GPU]
        assert max(before[1], after[1]) < 0.2
        assert before[0] != after[0]


@pytest.mark.long
@pytest.mark.parametrize("name", ["PPO at ZeRO 3", "PPO at ZeRO 3, split"])
def test_ppo_equals_that_of_whole_copies_at_stage_0(two_ranks, name):
    whole, sharded = (two_ranks[0][run] for run in ("PPO at ZeRO 0", name))
    assert len(whole) == len(sharded) == 3
    for step, (expected, found) in enumerate(zip(whole, sharded, strict=True), start=1):
        assert found["rollout/logprob_gap"] < 1e-5
        for key, value in expected.items():
            if not key.startswith("time/") and "grad_norm" not in key:
                assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-6), f"{key} at {step}"


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_computes_the_family(make_model, world, family):
    folder = make_model(family, seed=3, vocabulary=320, **FAMILIES[family])
    policy, contract = freeze(load_policy(folder, "fp32")), TokenContract.read(folder)
    generator = VLLMGenerator(policy, contract, rows=2, longest=62, **options(world))
    rollout = generator.generate(PROMPTS, SAMPLING, SEEDS)
    assert gap(rollout, policy, contract) < 1e-4


@pytest.mark.parametrize("kept", ["", ".layers.1.", "layers.0.mlp.down_proj", "norm.weight"])
def test_weights_that_a_transfer_leaves_out_never_answer(make_model, world, monkeypatch, kept):
    """vLLM keeps them and only logs that; a step as small as this one shows in no gap."""
    monkeypatch.setattr(vllm_generator, "_ENGINES", {})  # NaN stays in the pages of this one
    folder = make_model("llama", seed=3, **HEADS)
    policy, contract = freeze(load_policy(folder, "fp32")), TokenContract.read(folder)
    generator = VLLMGenerator(policy, contract, rows=2, longest=62, **options(world))
    before = generator.generate(PROMPTS, SAMPLING, SEEDS)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 1e-6 * weight.sign()
    after = generator.generate(PROMPTS, SAMPLING, SEEDS)
    assert 0 < (after.logprobs - before.logprobs).abs().mean() < 1e-4
    weights = generator._weights
    with monkeypatch.context() as broken:
        broken.setattr(
            VLLMGenerator, "_weights", lambda self: (own for own in weights() if kept not in own[0])
        )
        with pytest.raises(StageError, match=r"found weights .* that the transfer .* left out"):
            generator.generate(PROMPTS, SAMPLING, SEEDS)


@pytest.mark.parametrize("family", REFUSED)
def test_other_families_are_refused(make_model, world, family):
    """vLLM would change the class of GPT-NeoX, the actor's own."""
    folder = make_model(family, seed=3, **REFUSED[family])
    policy, contract = freeze(load_policy(folder, "fp32")), TokenContract.read(folder)
    with pytest.raises(
        ConfigError,
        match=rf"evaluate\.generator: found vllm, expected another generator for the family "
        rf"{family}, .* Fix: set it to transformers",
    ):
        VLLMGenerator(policy, contract, rows=2, longest=20, **options(world, "evaluate"))
    assert policy(torch.tensor([[5, 6]])).logits.isfinite().all()


def test_an_engine_that_samples_from_other_weights_is_refused(make_model, world, monkeypatch):
    folder = make_model("llama", seed=3, **HEADS)
    policy, contract = freeze(load_policy(folder, "fp32")), TokenContract.read(folder)
    weights = vllm_generator.whole_weights
    monkeypatch.setattr(
        vllm_generator,
        "whole_weights",
        lambda *of: ((name, weight * 1.2) for name, weight in weights(*of)),
    )
    with pytest.raises(ConfigError, match=r"family llama, which vLLM computes differently"):
        VLLMGenerator(policy, contract, rows=2, longest=20, **options(world, "evaluate"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
