"""Properties of every model family, whatever its positions, dropout, weight ties and caches.

Each reference value is Hugging Face's own forward pass over one row, without padding, mask or
positions.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.model_files import save_model
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.generation.generator import row_seeds, uniform_draws
from rlhf_pipeline.generation.transformers_generator import TransformersGenerator
from rlhf_pipeline.models import forward
from rlhf_pipeline.models.forward import response_logprobs, response_values, sequence_scores
from rlhf_pipeline.models.loading import assert_no_dropout, freeze, load_policy, load_tokenizer
from rlhf_pipeline.models.scalar_head import load_scores
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.rl.logprobs import divergence

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12]]
RESPONSES = [[13, 1], [14, 15, 16, 1], [17, 18, 19]]
ROWS = list(zip(PROMPTS, RESPONSES, strict=True))
BATCH = collate(PROMPTS, RESPONSES, pad_id=0)
WIDE = 320
STATEFUL = "qwen3_5_text", "qwen3_next", "lfm2", "granitemoehybrid"
"""Families with states that are no keys and values."""
TIED = "opt", "gpt2", "bloom", "qwen2", "smollm3", "gemma3_text", "gemma4_text", "lfm2"
"""Families with one matrix for embeddings and output."""


@pytest.fixture(scope="module")
def checkpoint(make_model, family):
    """A policy whose embedding has about thirty more rows than there are tokens."""
    return make_model(family, vocabulary=WIDE)


@pytest.fixture(scope="module")
def contract(checkpoint):
    return TokenContract.read(checkpoint)


@pytest.fixture(scope="module")
def policy(checkpoint):
    return freeze(load_policy(checkpoint, "fp32"))


@pytest.fixture(scope="module")
def scorer(checkpoint):
    model = load_scores(checkpoint, "fp32", new_head=True)
    torch.manual_seed(1)
    torch.nn.init.normal_(model.classifier.score.weight)
    return freeze(model)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_logprobs_equal_those_of_each_row_alone(policy, contract):
    ours = response_logprobs(policy, BATCH, vocab_size=contract.vocab_size)
    for i, (prompt, response) in enumerate(ROWS):
        logits = policy(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        theirs = logits[:, : contract.vocab_size].log_softmax(-1)[range(len(response)), response]
        close(ours[i, : len(response)], theirs)


def test_values_and_scores_equal_those_of_each_row_alone(scorer):
    """A token's value is the scalar at the previous token; the score is the one at the last."""
    values, scores = response_values(scorer, BATCH), sequence_scores(scorer, BATCH)
    for i, (prompt, response) in enumerate(ROWS):
        ids = torch.tensor([prompt + response])
        scalars = scorer.classifier.score(scorer.classifier.base_model(input_ids=ids)[0])[0, :, 0]
        close(values[i, : len(response)], scalars[len(prompt) - 1 : -1])
        close(scores[i], scorer.classifier(input_ids=ids).logits[0, 0])


def test_padding_is_computed_only_by_families_that_need_it(policy, scorer, family):
    """BLOOM's positions are a part of its mask; others have states that would cross the border."""
    for model in (policy, scorer):
        assert forward.probe_capabilities(model).packed == (family not in ("bloom", *STATEFUL))


def test_dropout_is_off_whatever_the_family_calls_it(checkpoint, scorer, family):
    def drops(model):
        model.train()
        inputs = BATCH.model_inputs() | {"output_hidden_states": True}
        passes = [model(**inputs).hidden_states[-1] for _ in range(8)]
        return any(not torch.equal(one, passes[0]) for one in passes)

    untouched = AutoModelForCausalLM.from_pretrained(checkpoint)
    if family == "lfm2":  # it has no dropout
        assert not drops(untouched)
    else:
        assert drops(untouched)
        with pytest.raises(AssertionError, match="dropout is active in "):
            assert_no_dropout(untouched)

    policy = load_policy(checkpoint, "fp32")
    assert not drops(policy)
    assert_no_dropout(policy)
    assert_no_dropout(scorer)
    assert not drops(load_scores(checkpoint, "fp32", new_head=True).classifier)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_generation_is_sampling_token_by_token(policy, contract, temperature):
    """Each row alone, without padding or cache: the first token whose CDF exceeds the draw.

    Rows of the embedding beyond the vocabulary have no probability.
    """
    sampling = SamplingConfig(max_response_tokens=16, batch_size_per_gpu=3, temperature=temperature)
    seeds = row_seeds(3, 1, np.arange(3))
    draws = uniform_draws(seeds, 16)
    rollout = TransformersGenerator(policy, contract).generate(PROMPTS, sampling, seeds).sequences
    for i, prompt in enumerate(PROMPTS):
        ids = list(prompt)
        for draw in draws[i].tolist():
            logits = policy(input_ids=torch.tensor([ids])).logits[0, -1, : contract.vocab_size]
            weights = np.exp(logits.double().numpy() / temperature)
            ids.append(int(np.argmax(weights.cumsum() > draw * weights.sum())))
            if ids[-1] == 1:
                break
        assert rollout.response_ids[i, rollout.action_mask[i]].tolist() == ids[len(prompt) :]


def test_sampler_and_training_agree_also_behind_rows_that_have_finished(policy, contract):
    """Every eighth token ends a response, so finished rows leave the batch again and again."""
    ends = replace(contract, eos_ids=(1, *range(8, contract.vocab_size, 8)))
    prompts, seeds = PROMPTS * 4, row_seeds(5, 1, np.arange(12))
    sampling = SamplingConfig(max_response_tokens=24, batch_size_per_gpu=12)
    rollout = TransformersGenerator(policy, ends).generate(prompts, sampling, seeds)
    lengths = rollout.sequences.real_mask.sum(1)
    assert len(lengths.unique()) > 3
    trained = response_logprobs(policy, rollout.sequences, vocab_size=contract.vocab_size)
    apart = (trained - rollout.logprobs)[rollout.sequences.real_mask].abs().max()
    assert apart < 1e-4


def test_a_saved_policy_loads_as_the_same_policy(policy, checkpoint, contract, tmp_path):
    expected = response_logprobs(policy, BATCH, vocab_size=300)
    save_model(policy, load_tokenizer(checkpoint), tmp_path / "saved")
    again = freeze(load_policy(tmp_path / "saved", "fp32"))
    assert torch.equal(response_logprobs(again, BATCH, vocab_size=300), expected)
    assert TokenContract.read(tmp_path / "saved") == contract
    tied = again.get_output_embeddings().weight is again.get_input_embeddings().weight
    assert tied == (again.config.model_type in TIED)


def test_a_saved_scorer_is_the_same_with_transformers_too(scorer, checkpoint, tmp_path):
    expected = sequence_scores(scorer, BATCH)
    save_model(scorer, load_tokenizer(checkpoint), tmp_path / "saved")
    again = freeze(load_scores(tmp_path / "saved", "fp32"))
    weights, loaded = scorer.state_dict(), again.state_dict()
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)
    found = sequence_scores(again, BATCH)
    # Rounding of these two depends on where in memory a file is mapped.
    is_exact = again.classifier.config.model_type not in ("gemma3_text", "olmo3")
    assert torch.equal(found, expected) if is_exact else close(found, expected) is None

    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    rows = [prompt + response for prompt, response in ROWS]
    ids = torch.tensor([row + [0] * (7 - len(row)) for row in rows])
    logits = classifier(input_ids=ids, attention_mask=(ids != 0).long()).logits
    close(expected, logits[:, 0])


# --- forward passes on one family -----------------------------------------------------------------


def test_a_language_model_is_not_a_reward_model(make_model):
    message = r"is not a reward model: it has no weights for score\.weight"
    with pytest.raises(ArtifactError, match=message):
        load_scores(make_model(), "fp32")


def test_a_head_in_bf16_gives_scores_in_fp32(make_model):
    """Neighbouring bf16 numbers around 4 differ by 1/32, more than many margins of scores."""
    model = freeze(load_scores(make_model(), "bf16", new_head=True))
    torch.manual_seed(1)
    torch.nn.init.normal_(model.head.weight)
    scores = sequence_scores(model, BATCH)
    assert model.head.weight.dtype == torch.bfloat16 and scores.dtype == torch.float32
    assert not torch.equal(scores, scores.bfloat16().float())


def test_a_critic_scales_its_scalars_and_adds_an_offset(make_model):
    critic = freeze(load_scores(make_model(), "fp32", new_head=True))
    torch.nn.init.normal_(critic.head.weight)
    raw = response_values(critic, BATCH)
    critic.scale, critic.offset = 2.0, -6.0
    mask = BATCH.action_mask
    torch.testing.assert_close(response_values(critic, BATCH)[mask], 2 * raw[mask] - 6)


@pytest.mark.parametrize("count", [None, 3])
@pytest.mark.parametrize("student", ["llama", "bloom"])
@pytest.mark.parametrize("teacher", ["llama", "bloom"])
def test_a_teacher_is_compared_row_by_row(make_model, student, teacher, count):
    """Packed or padded, each of them, and with different numbers of unused columns."""
    models = [
        load_policy(make_model(student, seed=1, vocabulary=300), "fp32"),
        load_policy(make_model(teacher, seed=2, vocabulary=310), "fp32"),
    ]
    packed = [forward.probe_capabilities(each).packed for each in models]
    assert packed == [name != "bloom" for name in (student, teacher)]
    how = {"beta": 0.3, "top_k": count}
    found = forward.response_divergences(*models, BATCH, vocab_size=288, temperature=0.7, **how)
    for row, (prompt, response) in enumerate(ROWS):
        ids, start = torch.tensor(prompt + response), len(prompt) - 1
        s, t = (
            (model(input_ids=ids[None]).logits[0, start:-1, :288] / 0.7).log_softmax(-1)
            for model in models
        )
        expected = [p.gather(1, ids[start + 1 :, None]).squeeze(1) for p in (s, t)]
        expected[1:1] = [-(s.exp() * s).sum(-1), divergence(s, t, **how)]
        for each, own in zip(found, expected, strict=True):
            torch.testing.assert_close(each[row, : len(response)], own, rtol=1e-4, atol=1e-5)
