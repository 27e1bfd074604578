"""Forward passes on one family; `test_families.py` tests all families."""

import pytest
import torch

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.forward import response_values, sequence_scores
from rlhf_pipeline.models.loading import freeze
from rlhf_pipeline.models.scalar_head import load_scores
from rlhf_pipeline.models.sequences import collate

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
