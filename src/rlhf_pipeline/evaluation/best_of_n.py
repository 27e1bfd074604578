"""The best of several answers of one policy by the reward model: a bound for a training on it."""

import math
from collections.abc import Sequence

import numpy as np

from rlhf_pipeline.config.evaluate import REWARD_MODEL
from rlhf_pipeline.evaluation.comparison import Answer, complete_judges, score_name, scores_by
from rlhf_pipeline.statistics import mean_with_interval


def best_of_n(draws: Sequence[list[Answer]]) -> list[dict[str, float]]:
    """The mean scores of the best of n answers of one policy, for n = 1, 2, 4, ...

    The reward model chooses among the first n draws. A policy that has this KL and lower scores
    got less out of the reward model than a choice among answers of SFT:

        KL <= log n - (n - 1) / n

    Source: Stiennon et al. 2020, https://arxiv.org/abs/2009.01325, appendix G.3; that this is an
    upper bound: Beirami et al. 2024, https://arxiv.org/abs/2401.01879.

    Args:
        draws: the answers to the same prompts in order, once for each draw.
    """
    judges, curve, n = complete_judges([a for given in draws for a in given]), [], 1
    while n <= len(draws):
        best = [max(tried, key=_by_reward_model) for tried in zip(*draws[:n], strict=True)]
        score, lower, upper = mean_with_interval(scores_by(best, REWARD_MODEL))
        curve.append(
            {"n": n, "kl": math.log(n) - (n - 1) / n}
            | {score_name(judge): float(np.mean(scores_by(best, judge))) for judge in judges}
            | {"score": score, "score_lower": lower, "score_upper": upper}
        )
        n *= 2
    return curve


def _by_reward_model(answer: Answer) -> float:
    score = answer.scores[REWARD_MODEL]
    assert score is not None, "the reward model scores every answer"
    return score
