"""What every generator promises: the policy's own distribution, for each prompt and seed alone."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from rlhf_pipeline.config.training import HybridConfig, SamplingConfig, TrainedModelConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.distributed.optimizer_step import optimizer_step
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.generation.generator import row_seeds, uniform_draws
from rlhf_pipeline.generation.hybrid_generator import HybridGenerator
from rlhf_pipeline.generation.transformers_generator import TransformersGenerator
from rlhf_pipeline.generation.vllm_generator import VLLMGenerator
from rlhf_pipeline.models.forward import response_logprobs
from rlhf_pipeline.models.loading import load_policy

WITH_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm: make vllm")
HEADS = {"hidden_size": 64, "num_attention_heads": 2}
"""Heads of 32 numbers, the smallest that vLLM has on a CPU."""

PROMPTS = [[5, 6, 7, 8, 9, 10], [8], [9, 10, 11, 12, 13], [5, 6, 7, 8, 9, 11, 12], [14, 15]]
SAMPLING = SamplingConfig(max_response_tokens=12, batch_size_per_gpu=3)
GREEDY = SAMPLING.model_copy(update={"temperature": 1e-4})
SEEDS = row_seeds(1, 1, np.arange(len(PROMPTS)))
OPTIONS = {"rows": 3, "longest": 20, "place": "ppo.generator", "hybrid": None}


@pytest.fixture(scope="module")
def folder(make_model):
    return make_model("llama", seed=3, vocabulary=320, **HEADS)


@pytest.fixture(scope="module")
def contract(folder):
    return TokenContract.read(folder)


@pytest.fixture
def engine(folder, world):
    config = TrainedModelConfig.model_validate({"optimizer": {"learning_rate": 1e-2}})
    return train_engine(partial(load_policy, folder), config, 2)


@pytest.fixture(params=["transformers", "hybrid", pytest.param("vllm", marks=WITH_VLLM)])
def make(request, engine, world):
    """Makes a generator for the engine."""
    return {
        "transformers": partial(TransformersGenerator, engine),
        "hybrid": lambda contract: HybridGenerator(engine, contract, HybridConfig(), world),
        "vllm": partial(VLLMGenerator, engine, **OPTIONS, world=world),
    }[request.param]


def responses(rollout):
    rows = zip(rollout.sequences.response_ids, rollout.sequences.action_mask, strict=True)
    return [ids[mask].tolist() for ids, mask in rows]


@WITH_VLLM
def test_vllm_transfers_the_weights_of_several_turns_once(engine, contract, world, monkeypatch):
    """And what it keeps of the first turn does not change the second one."""
    options = OPTIONS | {"longest": 40}
    generator, transfers = VLLMGenerator(engine, contract, **options, world=world), []
    weights = generator._weights
    monkeypatch.setattr(generator, "_weights", lambda: transfers.append(1) or weights())
    with generator.same_weights():
        first = generator.generate(PROMPTS, SAMPLING, SEEDS)
        longer = [[*a, *b, 7] for a, b in zip(PROMPTS, responses(first), strict=True)]
        second = generator.generate(longer, SAMPLING, row_seeds(1, 2, np.arange(len(PROMPTS))))
    assert len(transfers) == 1
    with torch.no_grad():
        own = response_logprobs(engine, second.sequences, vocab_size=contract.vocab_size)
    mask = second.sequences.action_mask
    torch.testing.assert_close(second.logprobs[mask], own[mask], rtol=0, atol=1e-4)
    generator.generate(PROMPTS, SAMPLING, SEEDS)
    assert len(transfers) == 2


def most_likely(engine, prompt, contract):
    """The greedy response, by whole forward passes."""
    ids = list(prompt)
    while len(ids) < len(prompt) + 12:
        with torch.no_grad():
            logits = engine.module(torch.tensor([ids])).logits[0, -1, : contract.vocab_size]
        ids.append(int(logits.argmax()))
        if ids[-1] in contract.eos_ids:
            break
    return ids[len(prompt) :]


def test_greedy_responses_are_the_likeliest_before_and_after_a_step(make, engine, contract, world):
    """No key or value of the weights before the step is used after it."""
    generator, found = make(contract), []
    for _ in range(2):
        rollout = generator.generate(PROMPTS, GREEDY, SEEDS)
        assert responses(rollout) == [most_likely(engine, prompt, contract) for prompt in PROMPTS]
        found.append(responses(rollout))

        def loss(batch=rollout.sequences):
            logprobs = response_logprobs(engine, batch, vocab_size=contract.vocab_size)
            return logprobs.where(batch.action_mask, 0.0).mean(), {}

        optimizer_step(engine, world, [loss])
    assert found[0] != found[1]


def test_a_response_ends_after_the_first_of_several_eos_tokens(make, contract):
    ends = replace(contract, eos_ids=tuple(range(1, 40)))  # about one token of seven
    rows = responses(make(ends).generate(PROMPTS * 8, SAMPLING, row_seeds(5, 1, np.arange(40))))
    assert {len(row) for row in rows} > {1, 2, 12}
    for row in rows:
        assert not set(row[:-1]) & set(ends.eos_ids)
        assert len(row) == 12 or row[-1] in ends.eos_ids


def test_a_response_depends_on_its_prompt_and_its_seed_only(make, contract):
    generator = make(contract)
    whole = responses(generator.generate(PROMPTS, SAMPLING, SEEDS))
    assert responses(generator.generate(PROMPTS[1::2], SAMPLING, SEEDS[1::2])) == whole[1::2]
    assert responses(generator.generate(PROMPTS[::-1], SAMPLING, SEEDS[::-1])) == whole[::-1]
    others = row_seeds(1, 2, np.arange(len(PROMPTS)))
    assert responses(generator.generate(PROMPTS, SAMPLING, others)) != whole


@pytest.mark.parametrize("prompts", [PROMPTS * 3, [*PROMPTS * 2, *PROMPTS[:2]]])
def test_several_responses_to_a_prompt_are_those_of_their_seeds(make, contract, prompts):
    generator, seeds = make(contract), row_seeds(1, 1, np.arange(len(prompts)))
    together = responses(generator.generate(prompts, SAMPLING, seeds))
    alone = []
    for start in range(0, len(prompts), len(PROMPTS)):
        own = slice(start, start + len(PROMPTS))
        alone += responses(generator.generate(prompts[own], SAMPLING, seeds[own]))
    assert together == alone
    assert together[0] != together[len(PROMPTS)]


def test_the_log_probabilities_are_those_of_the_policy(make, engine, contract):
    sampling = SAMPLING.model_copy(update={"temperature": 0.7})
    rollout = make(contract).generate(PROMPTS, sampling, SEEDS)
    with torch.no_grad():
        expected = response_logprobs(
            engine, rollout.sequences, vocab_size=contract.vocab_size, temperature=0.7
        )
    mask = rollout.sequences.action_mask
    torch.testing.assert_close(rollout.logprobs[mask], expected[mask])


def test_draws_depend_on_the_seed_of_their_row_only():
    whole = uniform_draws(row_seeds(7, 3, np.arange(6)), 4)
    assert whole.dtype == torch.float64 and whole.shape == (6, 4)
    assert torch.equal(uniform_draws(row_seeds(7, 3, np.array([1, 3, 5])), 4), whole[1::2])
    assert not torch.equal(uniform_draws(row_seeds(7, 4, np.arange(6)), 4), whole)
    assert not torch.equal(uniform_draws(row_seeds(8, 3, np.arange(6)), 4), whole)


def test_operators_without_gradients_are_refused_in_training(engine, world, contract, monkeypatch):
    """vLLM would replace those of the whole process, which also trains."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ConfigError) as refused:
        VLLMGenerator(engine, contract, **OPTIONS, world=world)
    assert str(refused.value) == (
        "VLLM_BATCH_INVARIANT: found 1, expected none with ppo.generator: vLLM replaces operators "
        "of torch in this process, and training needs their gradients. Fix: unset it"
    )
