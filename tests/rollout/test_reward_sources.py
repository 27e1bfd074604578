"""The weighted sum of the sources of `ppo.rewards`."""

from dataclasses import replace

import pytest
import torch

from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.models.loading import load_tokenizer
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.rollout.reward_sources import RewardSum
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.heartbeat import Heartbeat


def write(folder, source):
    (folder / "my.py").write_text(source)
    return {"rewards.0": folder / "my.py", "rewards.1": folder / "my.py"}


def test_the_trained_model_alone_is_centred_exactly_and_reads_no_text(load, scored):
    """The rows have no messages, and there is no tokenizer to decode responses with."""
    rewards = load("trained", trained_mean=0.1)
    total = RewardSum(rewards.sources, tokenizer=None)(scored, {"prompt_ids": [[5], [6, 6], [7]]})
    assert torch.equal(total.scores, scored.scores - 0.1)
    assert total.parts == {}
    assert total.sequences is scored.sequences


def test_a_source_of_weight_0_changes_no_bit_of_the_score(load, scored, rows, tmp_path):
    files = write(tmp_path, "def zero(prompts, responses): return [7.0] * len(responses)")
    zero = {"callable": f"{tmp_path}/my.py:zero", "weight": 0.0}
    total = load("trained", zero, files=files, trained_mean=0.1)(scored, rows)
    assert torch.equal(total.scores, scored.scores - 0.1)
    assert total.parts.keys() == {"trained", "zero"}


def test_the_heartbeat_names_the_source_that_scores(load, scored, rows, tmp_path, monkeypatch):
    """A function that waits for a server is named in the progress line, and if it hangs."""
    source = """
from rlhf_pipeline.runtime import heartbeat

def f(prompts, responses): return [len(heartbeat._here.scorer)] * 3

def fails(prompts, responses): raise OSError("no answer")
"""
    monkeypatch.setattr(heartbeat, "_here", Heartbeat(0, None, "scoring", 7))
    files = write(tmp_path, source)
    named = {"callable": f"{tmp_path}/my.py:f", "name": "length"}
    total = load("trained", named, files=files, trained_mean=0.1)(scored, rows)
    assert total.parts["length"].tolist() == [6.0, 6.0, 6.0]
    assert heartbeat._here.scorer == ""
    with pytest.raises(StageError, match="no answer"):
        load(f"{tmp_path}/my.py:fails", files=files)(scored, rows)
    assert str(heartbeat._here).startswith("scoring by fails of step 7 since ")


def test_the_score_is_the_weighted_sum_of_centred_scores(load, scored, rows, tmp_path):
    """2 * (1.1 - 0.1, 0.1 - 0.1, -0.9 - 0.1) + 0.5 * (4, 2, 0) = 4, 1, -2."""
    files = write(tmp_path, "def f(prompts, responses): return [4, 2.0, False]")
    weighted = {"model": "trained", "weight": 2}
    half = {"callable": f"{tmp_path}/my.py:f", "weight": 0.5}
    total = load(weighted, half, files=files, trained_mean=0.1)(scored, rows)
    torch.testing.assert_close(total.scores, torch.tensor([4.0, 1.0, -2.0]), rtol=1e-5, atol=1e-6)
    trained = torch.tensor([1.0, 0.0, -1.0])
    torch.testing.assert_close(total.parts["trained"], trained, rtol=1e-5, atol=1e-6)
    assert total.parts["f"].tolist() == [4.0, 2.0, 0.0]


def test_the_centred_scores_of_models_are_clipped_before_their_weight(load, scored, rows, tmp_path):
    """2 * (1, 0, -1) clipped to 0.4, plus 0.5 * (40, 20, 0)."""
    files = write(tmp_path, "def f(prompts, responses): return [40, 20, 0]")
    weighted = {"model": "trained", "weight": 2}
    half = {"callable": f"{tmp_path}/my.py:f", "weight": 0.5}
    clip = {"score_clip": 0.4}
    total = load(weighted, half, files=files, trained_mean=0.1, **clip)(scored, rows)
    torch.testing.assert_close(total.clipped_scores, torch.tensor([20.8, 10.0, -0.8]))
    torch.testing.assert_close(total.scores, torch.tensor([22.0, 10.0, -2.0]))
    total = load(weighted, half, files=files, trained_mean=0.1, score_clip=None)(scored, rows)
    assert torch.equal(total.clipped_scores, total.scores)


def test_a_source_of_text_fails_on_rows_without_references(load, scored, rows, tmp_path):
    files = write(tmp_path, "def zero(prompts, responses): return [0] * len(responses)")
    rewards = load(f"{tmp_path}/my.py:zero", files=files)
    del rows["reference"]
    with pytest.raises(
        ArtifactError, match=r"the prompts have no column reference\. Fix: run stage split again"
    ):
        rewards(scored, rows)


def test_responses_become_text_without_special_tokens_and_white_space(
    load, policy, contract, scored, rows, tmp_path
):
    source = """
def f(prompts, responses, references):
    assert responses == ['snow', ''], responses
    return [0, 0]
"""
    rewards = load(f"{tmp_path}/my.py:f", files=write(tmp_path, source))
    ids = [load_tokenizer(policy)(" snow<|end|>")["input_ids"], [contract.eos_id]]
    sequences = collate([[5], [5]], ids, contract.pad_id)
    total = rewards(
        replace(scored, sequences=sequences), {name: value[:2] for name, value in rows.items()}
    )
    assert total.scores.tolist() == [0.0, 0.0]
