"""Forward passes on one family; `test_families.py` tests all families."""

import pytest
import torch

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.forward import response_logprobs, response_values, sequence_scores
from rlhf_pipeline.models.loading import freeze, load_policy
from rlhf_pipeline.models.scalar_head import load_scores, store_score_mean
from rlhf_pipeline.models.sequences import collate

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12]]
RESPONSES = [[13, 1], [14, 15, 16, 1], [17, 18, 19]]


def test_values_belong_to_the_state_before_each_token(make_model):
    """Token t + 1 has the scalar at token t as its value; the score is the last scalar."""
    model = freeze(load_scores(make_model(), "fp32", new_head=True))
    torch.nn.init.normal_(model.classifier.score.weight)
    batch = collate([[5, 6]], [[13, 14, 1]], 0)
    scalars = model(**batch.model_inputs(), scores_to_keep=5)[0]
    torch.testing.assert_close(response_values(model, batch)[0], scalars[1:4])
    torch.testing.assert_close(sequence_scores(model, batch)[0], scalars[4])


def test_padded_vocabulary_rows_have_no_probability(make_model):
    wide = freeze(load_policy(make_model("llama", vocabulary=384), "fp32"))
    batch = collate([[5]], [[6]], 0)
    logits = wide(input_ids=torch.tensor([[5]])).logits[0, 0]
    expected = logits[:288].log_softmax(0)[6]
    torch.testing.assert_close(response_logprobs(wide, batch, vocab_size=288)[0, 0], expected)


def test_a_language_model_is_not_a_reward_model(make_model):
    with pytest.raises(
        ArtifactError, match=r"is not a reward model: it has no weights for score\.weight"
    ):
        load_scores(make_model(), "fp32")


def test_the_score_mean_is_stored_with_the_model(make_model, tmp_path):
    model = load_scores(make_model(), "fp32", new_head=True)
    model.classifier.save_pretrained(tmp_path)
    (tmp_path / "token_contract.json").write_bytes(
        (make_model() / "token_contract.json").read_bytes()
    )
    store_score_mean(tmp_path, 0.75)
    assert load_scores(tmp_path, "fp32").score_mean == 0.75


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
