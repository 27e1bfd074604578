"""Generation by transformers, with given random numbers."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.models.forms import form_of
from rlhf_pipeline.models.forward import response_logprobs
from rlhf_pipeline.models.loading import freeze, load_policy
from rlhf_pipeline.rl.sampling import sampled
from rlhf_pipeline.rollout import transformers_generator
from rlhf_pipeline.rollout.generation import row_seeds
from rlhf_pipeline.rollout.transformers_generator import Decoding, TransformersGenerator

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]


@pytest.fixture(scope="module")
def policy(make_model):
    folder = make_model("llama", seed=3)
    return freeze(load_policy(folder, "fp32")), TokenContract.read(folder)


@pytest.fixture(scope="module")
def generator(policy):
    return TransformersGenerator(*policy)


def responses(sequences):
    return [
        row[mask].tolist()
        for row, mask in zip(sequences.response_ids, sequences.response_mask, strict=True)
    ]


@pytest.mark.parametrize("size", [1, 3])
def test_responses_do_not_depend_on_the_micro_batches(generator, size):
    def sequences(batch_size):
        sampling = SamplingConfig(max_response_tokens=12, batch_size_per_gpu=batch_size)
        seeds = row_seeds(1, 1, np.arange(4))
        return generator.generate(PROMPTS, sampling, seeds).sequences

    whole = sequences(4)
    assert responses(sequences(size)) == responses(whole)
    assert whole.prompt_ids[1, whole.prompt_mask[1]].tolist() == [8]


def test_several_responses_to_a_prompt_read_it_once(policy, generator):
    sampling, seeds = SamplingConfig(max_response_tokens=12), row_seeds(1, 1, np.arange(12))
    form_of(policy[0])  # probes the model
    read = []
    hook = policy[0].register_forward_pre_hook(
        lambda _, args, inputs: read.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    together = generator.generate(PROMPTS * 3, sampling, seeds)
    hook.remove()
    assert read[0] == sum(map(len, PROMPTS))
    alone = [generator.generate(PROMPTS, sampling, seeds[first : first + 4]) for first in (0, 4, 8)]
    assert responses(together.sequences) == [
        row for rollout in alone for row in responses(rollout.sequences)
    ]


def test_a_response_depends_on_its_own_seed_only(generator):
    """As on two ranks: every second row alone has the response that it has among all rows."""
    sampling = SamplingConfig(max_response_tokens=12, batch_size_per_gpu=4)
    seeds = row_seeds(1, 1, np.arange(4))
    whole = responses(generator.generate(PROMPTS, sampling, seeds).sequences)
    own = responses(generator.generate(PROMPTS[1::2], sampling, seeds[1::2]).sequences)
    assert own == whole[1::2]
    others = generator.generate(PROMPTS, sampling, row_seeds(1, 2, np.arange(4))).sequences
    assert responses(others) != whole


def scripted(monkeypatch, *rows):
    """Let the first tokens of the responses be those of the rows, in the order of the draws."""
    script = torch.tensor(rows)
    steps = iter(range(script.shape[1]))

    def sampled(logits, draws, temperature, vocab_size):
        tokens = script[(draws * len(rows)).long(), next(steps)]
        return tokens, torch.zeros(len(tokens))

    monkeypatch.setattr(transformers_generator, "sampled", sampled)
    monkeypatch.setattr(
        transformers_generator,
        "uniform_draws",
        lambda seeds, width: torch.tensor([[(s[0] + 0.5) / len(rows)] * width for s in seeds]),
    )


def test_a_response_ends_after_its_eos_or_at_the_maximum_length(generator, monkeypatch):
    scripted(monkeypatch, [20, 1, 9, 9], [21, 22, 23, 24])
    rollout = generator.generate(
        [[5, 6], [5, 6]], SamplingConfig(max_response_tokens=4), [(0,), (1,)]
    )
    assert responses(rollout.sequences) == [[20, 1], [21, 22, 23, 24]]


def test_any_eos_of_the_model_ends_a_response(policy, monkeypatch):
    scripted(monkeypatch, [20, 22, 1, 9], [21, 1, 22, 9])
    generator = TransformersGenerator(policy[0], replace(policy[1], eos_ids=(1, 22)))
    rollout = generator.generate(
        [[5, 6], [5, 6]], SamplingConfig(max_response_tokens=4), [(0,), (1,)]
    )
    assert responses(rollout.sequences) == [[20, 22], [21, 1]]


def test_finished_rows_leave_the_batch_and_the_others_do_not_notice(policy, generator, monkeypatch):
    """The forward passes get smaller, and every response stays the one of its row alone."""
    sampling = SamplingConfig(max_response_tokens=24, batch_size_per_gpu=8)
    seeds = row_seeds(5, 1, np.arange(8))
    ends = replace(policy[1], eos_ids=tuple(range(1, 40)))  # about one token of seven
    together, sizes = TransformersGenerator(policy[0], ends), []
    monkeypatch.setattr(
        transformers_generator,
        "sampled",
        lambda logits, *rest: sizes.append(len(logits)) or sampled(logits, *rest),
    )
    whole = responses(together.generate(PROMPTS * 2, sampling, seeds).sequences)
    assert sizes[0] == 8 and sizes[-1] < 8 and sorted(sizes, reverse=True) == sizes
    alone = [
        responses(together.generate([prompt], sampling, [seed]).sequences)[0]
        for prompt, seed in zip(PROMPTS * 2, seeds, strict=True)
    ]
    assert whole == alone
    assert {len(row) for row in whole} != {24}


def test_the_sampler_returns_the_log_probabilities_of_the_policy(policy, generator):
    sampling = SamplingConfig(max_response_tokens=12, batch_size_per_gpu=3, temperature=0.7)
    rollout = generator.generate(PROMPTS, sampling, row_seeds(1, 1, np.arange(4)))
    mask = rollout.sequences.response_mask
    expected = response_logprobs(
        policy[0], rollout.sequences, vocab_size=policy[1].vocab_size, temperature=0.7
    )
    torch.testing.assert_close(rollout.logprobs[mask], expected[mask])


def test_samples_follow_the_policy(policy, generator):
    """First tokens of 4,000 responses to one prompt are within 5 standard errors of the policy."""
    count = 4000
    sampling = SamplingConfig(max_response_tokens=1, batch_size_per_gpu=1000, temperature=0.7)
    seeds = row_seeds(2, 1, np.arange(count))
    rollout = generator.generate([[5, 6, 7]] * count, sampling, seeds)
    first = rollout.sequences.response_ids[:, 0]
    expected = (policy[0](torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.7).softmax(0)
    observed = torch.bincount(first, minlength=len(expected)) / count
    assert (
        (observed - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt() + 1e-9
    ).all()


def test_the_host_looks_at_a_gpu_at_fixed_tokens_and_at_a_cpu_always():
    """With 40 tokens: after the 16th and the 32nd. Neither waits for time to pass."""
    finished = torch.tensor([True, False])
    device = SimpleNamespace(device=torch.device("cuda", 0), cpu=lambda: finished)
    decoding = Decoding.__new__(Decoding)
    found = {step: decoding._known(device, step) for step in range(40)}
    assert [step for step, known in found.items() if known is not None] == [15, 31]
    assert found[15] is finished
    assert all(decoding._known(finished, step) is finished for step in range(40))


def test_rows_that_leave_at_fixed_tokens_have_the_same_responses(policy, generator, monkeypatch):
    """As on a GPU. Some rows end early, and none of them gets a token after its EOS."""
    sampling = SamplingConfig(max_response_tokens=40, batch_size_per_gpu=4, temperature=2.0)
    seeds = row_seeds(1, 1, np.arange(24))
    expected = responses(generator.generate(PROMPTS * 6, sampling, seeds).sequences)
    assert min(map(len, expected)) < 16 < max(map(len, expected))
    looks = []

    def known(self, finished, step):
        looks.append(step)
        return finished if (step + 1) % 16 == 0 else None

    monkeypatch.setattr(Decoding, "_known", known)
    assert responses(generator.generate(PROMPTS * 6, sampling, seeds).sequences) == expected
    assert max(looks) >= 16
