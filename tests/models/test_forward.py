"""Forward passes on one family; `test_families.py` tests all families."""

import pytest
import torch

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.forward import (
    probe_capabilities,
    response_divergences,
    response_values,
    sequence_scores,
)
from rlhf_pipeline.models.loading import freeze, load_policy
from rlhf_pipeline.models.scalar_head import load_scores
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.rl.logprobs import divergence

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12]]
RESPONSES = [[13, 1], [14, 15, 16, 1], [17, 18, 19]]


def test_a_language_model_is_not_a_reward_model(make_model):
    with pytest.raises(
        ArtifactError, match=r"is not a reward model: it has no weights for score\.weight"
    ):
        load_scores(make_model(), "fp32")


def test_a_head_in_bf16_gives_scores_in_fp32(make_model):
    """Neighbouring bf16 numbers around 4 differ by 1/32, more than many margins of scores."""
    model = freeze(load_scores(make_model(), "bf16", new_head=True))
    torch.manual_seed(1)
    torch.nn.init.normal_(model.head.weight)
    scores = sequence_scores(model, collate(PROMPTS, RESPONSES, 0))
    assert model.head.weight.dtype == torch.bfloat16 and scores.dtype == torch.float32
    assert not torch.equal(scores, scores.bfloat16().float())


def test_a_critic_scales_its_scalars_and_adds_an_offset(make_model):
    batch = collate(PROMPTS, RESPONSES, 0)
    critic = freeze(load_scores(make_model(), "fp32", new_head=True))
    torch.nn.init.normal_(critic.head.weight)
    raw = response_values(critic, batch)
    critic.scale, critic.offset = 2.0, -6.0
    mask = batch.action_mask
    torch.testing.assert_close(response_values(critic, batch)[mask], 2 * raw[mask] - 6)


@pytest.mark.parametrize("count", [None, 3])
@pytest.mark.parametrize("student", ["llama", "bloom"])
@pytest.mark.parametrize("teacher", ["llama", "bloom"])
def test_a_teacher_is_compared_row_by_row(make_model, student, teacher, count):
    """Packed or padded, each of them, and with different numbers of unused columns."""
    models = [
        load_policy(make_model(student, seed=1, vocabulary=300), "fp32"),
        load_policy(make_model(teacher, seed=2, vocabulary=310), "fp32"),
    ]
    packed = [probe_capabilities(each).packed for each in models]
    assert packed == [name != "bloom" for name in (student, teacher)]
    batch = collate(PROMPTS, RESPONSES, 0)
    found = response_divergences(
        *models, batch, beta=0.3, top_k=count, vocab_size=288, temperature=0.7
    )
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ids, start = torch.tensor(prompt + response), len(prompt) - 1
        s, t = (
            (model(input_ids=ids[None]).logits[0, start:-1, :288] / 0.7).log_softmax(-1)
            for model in models
        )
        expected = [p.gather(1, ids[start + 1 :, None]).squeeze(1) for p in (s, t)]
        expected[1:1] = [-(s.exp() * s).sum(-1), divergence(s, t, beta=0.3, top_k=count)]
        for each, own in zip(found, expected, strict=True):
            torch.testing.assert_close(each[row, : len(response)], own, rtol=1e-4, atol=1e-5)
