"""The best of several answers, by hand."""

import pytest

from rlhf_pipeline.evaluation.comparison import Answer, best_of_n


def answer(row, text, score, gold):
    return Answer(row, f"User: {row}?", text, {"score": score, "gold": gold}, 0.0, -1.0, 1, True)


def test_the_best_of_n_by_the_reward_model():
    """Two prompts, four draws. The reward model chooses, and its choice has a low gold score."""
    score = [(0.0, 1.0), (2.0, 0.0), (1.0, 3.0), (9.0, -1.0)]
    draws = [
        [answer(0, "a", first, -first), answer(1, "b", second, -second)] for first, second in score
    ]
    curve = best_of_n(draws)
    assert [point["n"] for point in curve] == [1, 2, 4]
    assert [point["score"] for point in curve] == [0.5, 1.5, 6.0]
    assert [point["gold_score"] for point in curve] == [-0.5, -1.5, -6.0]
    # log 2 - 1/2 = 0.1931472, log 4 - 3/4 = 0.6362944
    assert [point["kl"] for point in curve] == pytest.approx([0.0, 0.1931472, 0.6362944], rel=1e-6)
    low, high = (curve[1][f"score_{end}"] for end in ("lower", "upper"))
    assert low < 1.5 < high
    assert [point["n"] for point in best_of_n(draws[:2])] == [1, 2]
