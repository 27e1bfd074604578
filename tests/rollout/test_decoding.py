"""Steps that a stand-in for CUDA graphs records and replays, beside steps that are not recorded."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from recorded_graph import Graphs
from transformers import PreTrainedConfig

from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.models.loading import freeze, load_policy
from rlhf_pipeline.rollout import decoding, transformers_generator
from rlhf_pipeline.rollout.decoding import takes_prepared_mask
from rlhf_pipeline.rollout.generation import row_seeds
from rlhf_pipeline.rollout.transformers_generator import TransformersGenerator

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]
SAMPLING = SamplingConfig(max_response_tokens=40, batch_size_per_gpu=12)


@pytest.fixture
def graphs(monkeypatch):
    found = Graphs()
    monkeypatch.setattr(decoding, "record", found.record)
    monkeypatch.setattr(transformers_generator, "GRAPHS", {"cpu"})
    # As on a GPU, the weights stay in their own layout, where they are.
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    return found


@pytest.fixture
def load(make_model):
    """Loads a policy, and its tokens with `eos` tokens that end a response."""

    def policy(family="llama", eos=8):
        folder = make_model(family, seed=3)
        contract = replace(TokenContract.read(folder), eos_ids=tuple(range(1, 1 + eos)))
        return freeze(load_policy(folder, "fp32")), contract

    return policy


def sample(generator, sampling=SAMPLING, step=1, rows=12):
    prompts = (PROMPTS * 3)[:rows]
    rollout = generator.generate(prompts, sampling, row_seeds(1, step, np.arange(rows)))
    return rollout.sequences.response_ids, rollout.sequences.real_mask, rollout.logprobs


def equal(found, expected):
    """Equal tokens, and log-probabilities up to rounding: sums have more columns that are zero."""
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(found[2], expected[2], atol=2e-6, rtol=1e-5)


def test_replayed_steps_sample_what_other_steps_sample(load, family, graphs):
    model, contract = load(family)
    without = SAMPLING.model_copy(update={"cuda_graphs": False})
    expected = [sample(TransformersGenerator(model, contract), without, step) for step in (1, 2)]
    assert graphs.recorded == 0
    generator = TransformersGenerator(model, contract)
    for step, rollout in enumerate(expected, start=1):
        equal(sample(generator, step=step), rollout)
    lengths = expected[0][1].sum(1)
    assert lengths.min() < 16 < lengths.max()


def test_each_number_of_rows_is_recorded_once(load, graphs):
    """Twelve rows at first, then powers of two as rows finish; a second rollout records nothing."""
    model, contract = load()
    generator = TransformersGenerator(model, contract)
    sample(generator)
    recorded, replayed = graphs.recorded, graphs.replayed
    assert 2 <= recorded <= 4
    sample(generator)
    assert graphs.recorded == recorded and graphs.replayed > replayed + 16


def test_a_batch_that_is_not_full_uses_a_graph_of_more_rows(load, graphs):
    model, contract = load(eos=1)
    generator = TransformersGenerator(model, contract)
    whole = sample(generator)
    assert graphs.recorded == 1
    small = sample(generator, rows=7)
    assert graphs.recorded == 2  # eight rows
    equal(small, [x[:7] for x in whole])


def test_replays_read_new_weights_and_weights_elsewhere_need_new_graphs(load, graphs):
    model, contract = load(eos=1)
    generator = TransformersGenerator(model, contract)
    sample(generator)
    recorded = graphs.recorded
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    changed = sample(generator)
    assert graphs.recorded == recorded
    equal(changed, sample(TransformersGenerator(model, contract)))
    recorded = graphs.recorded
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() / 1.3
    equal(sample(generator), sample(TransformersGenerator(model, contract)))
    assert graphs.recorded == recorded + 2


def test_another_temperature_has_its_own_graphs(load, graphs):
    model, contract = load()
    generator, warm = (
        TransformersGenerator(model, contract),
        SAMPLING.model_copy(update={"temperature": 2.0}),
    )
    sample(generator)
    equal(sample(generator, warm), sample(TransformersGenerator(model, contract), warm))


def test_a_longer_rollout_gets_more_room(load, graphs):
    model, contract = load()
    generator, longer = (
        TransformersGenerator(model, contract),
        SAMPLING.model_copy(update={"max_response_tokens": 150}),
    )
    sample(generator)
    equal(sample(generator, longer), sample(TransformersGenerator(model, contract), longer))


def test_a_graph_that_computes_something_else_is_refused_with_figures(load, graphs, monkeypatch):
    model, contract = load()
    record = graphs.record

    def wrong(step):
        replay, weight = record(step), model.get_output_embeddings().weight

        def wrongly():
            weight.data.mul_(1.01)
            replay()

        return wrongly

    monkeypatch.setattr(decoding, "record", wrong)
    with pytest.raises(
        StageError, match=r"logits that differ .* by 0.01 .* set sampling.cuda_graphs to false"
    ):
        sample(TransformersGenerator(model, contract))


def test_a_wait_of_the_host_cannot_be_recorded(load, graphs, monkeypatch):
    """The stand-in is as strict as a GPU."""
    model, contract = load()
    sampled = decoding.sampled
    monkeypatch.setattr(
        decoding, "sampled", lambda logits, *rest: (logits.sum().item(), sampled(logits, *rest))[1]
    )
    with pytest.raises(RuntimeError, match="the host reads a value"):
        sample(TransformersGenerator(model, contract))


def test_nothing_is_recorded_if_no_single_mask_holds_for_all_layers(load, graphs):
    model, contract = load("mistral")
    model.config.sliding_window = 3
    sample(TransformersGenerator(model, contract))
    assert graphs.recorded == 0


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, True),
        ({"sliding_window": None}, True),
        ({"sliding_window": 64}, True),
        ({"sliding_window": 63}, False),
        ({"layer_types": ["full_attention"] * 2}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
    ],
)
def test_a_window_needs_a_mask_of_its_own_if_it_is_shorter_than_the_room(fields, expected):
    assert takes_prepared_mask(PreTrainedConfig(**fields), 64) is expected
