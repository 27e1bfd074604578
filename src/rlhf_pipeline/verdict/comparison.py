"""The comparison of two policies from their judged answers: metrics, win rates, pairs of answers.

The driver imports this module, so it must not import torch.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from rlhf_pipeline.config.rewards import GOLD, REWARD_MODEL, PairwiseJudge, ReferenceReward
from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.runtime.manifest import verified
from rlhf_pipeline.verdict.answers import (
    Answer,
    by_prompt,
    complete_judges,
    distinct_n,
    final_answer,
    refuses,
    repetition,
    score_name,
    scores_by,
)
from rlhf_pipeline.verdict.statistics import (
    cross_pairs,
    difference,
    length_controlled,
    mean_with_interval,
    share_with_interval,
    sign_test,
    smallest_visible_win_rate,
    standardized_gain,
    win_rate,
)

if TYPE_CHECKING:
    from rlhf_pipeline.config.evaluate import EvaluateConfig

BASELINE = "sft"
BASE_MODEL = "base_model"  # the baseline without SFT
INSTRUCT = "the instruct model"  # the name of a base model that has a chat template of its own
EVALUATION = "evaluation.json"  # file of an evaluation with its numbers
FURTHER = "_again"  # after the name of the baseline, its draws beyond `answers_per_prompt`
OF_SEVERAL = "_pass_at_"  # between judge and k in the name of a pass@k
MAJORITY = "majority_at_"  # before k in the name of the accuracy of the most frequent answer
OF_EPISODES = "turns", "calls", "malformed", "failed"  # fields of the record of an episode
State = Literal["independent", "unknown", "optimized"]
ENDS = ("rate", "lower", "upper")  # fields of a rate: itself, and the ends of its interval


def reward_title(names: Sequence[str]) -> str:
    """The names of rewards as they stand in a sentence; a weight may precede: "0.5 * trained"."""
    return " and ".join(re.sub(r"(^| \* )trained$", r"\1the reward model", name) for name in names)


@dataclass(frozen=True)
class Standing:
    """Where a judge stands towards the policies that it compares, see `independence`."""

    state: State
    by: dict[str, str] = field(default_factory=dict)
    """Why it is not independent, by policy. rewards: the training of the policy maximized its
    score; comparisons: it learned from the same comparisons; earlier: the training of a model that
    the policy was made from did so; unknown: the records do not exclude it."""


def _rank(standing: Standing) -> int:
    return get_args(State).index(standing.state)


def worst(*standings: Standing) -> Standing:
    """What several standings of one judge say together."""
    return max(standings, key=_rank)


def baseline_of(evaluation: Mapping[str, Any]) -> str:
    """The policy that the candidate is compared with: "sft", or without SFT "base_model"."""
    return str(next(iter(evaluation["policies"])))


def read_evaluation(folder: Path, *, earlier: bool = False) -> dict[str, Any]:
    """The evaluation in a folder. Raises ArtifactError if it was changed; so, too, if it has no
    `judges`, as by version 1.1, unless `earlier`."""
    evaluation: dict[str, Any] = json.loads(verified(folder, EVALUATION).read_text())
    if not (earlier or "judges" in evaluation):
        raise ArtifactError(
            f"{folder}: found an evaluation by an earlier version, without the standing of judges. "
            "Fix: compare its policies again by `kedro rlhf evaluate BASELINE CANDIDATE`"
        )
    return evaluation


def read_standings(evaluation: Mapping[str, Any]) -> dict[str, Standing]:
    """The standing of each judge of an evaluation."""
    return {judge: Standing(**fields) for judge, fields in evaluation["judges"].items()}


def deciding_judge(standings: Mapping[str, Standing]) -> str:
    """The judge whose win rate decides about a promotion.

    The gold score; without it, the first independent judge of `evaluate.judges` and `judge_model`,
    or else the first of unknown standing, or else the first; the reward model only if there is no
    other judge.
    """
    if GOLD in standings:
        return GOLD
    asked = [judge for judge in standings if judge != REWARD_MODEL]
    return min(asked, key=lambda judge: _rank(standings[judge]), default=REWARD_MODEL)


def compare(
    answers: dict[str, list[Answer]],
    config: "EvaluateConfig",
    standings: Mapping[str, Standing],
    drawn: list[Answer] | None = None,
    rewards: Sequence[str] = (),
) -> dict[str, Any]:
    """Compute the metrics of all policies, and the win rates against the baseline.

    The policies are the baseline, the candidate, and its variants. Their answers are in the order
    of prompts and draws; draw i of all has equal randomness. `standings` are those of all judges;
    the candidate's last training maximized `rewards`. `drawn` are all draws of the baseline; None:
    those of `answers`.
    """
    baseline, candidate, *variants = answers
    drawn = answers[baseline] if drawn is None else drawn
    prompts = len({answer.row for answer in answers[baseline]})
    order, scored = [GOLD, *(j.label for j in config.judges)], complete_judges(answers[baseline])
    others = sorted(scored, key=REWARD_MODEL.__eq__)
    judges = [j for j in order if j in scored] + [j for j in others if j not in order]
    standings = {judge: standings[judge] for judge in judges}
    pairwise = {judge.label for judge in config.judges if isinstance(judge, PairwiseJudge)}
    policies, changes = _metrics(answers, [j for j in judges if j not in pairwise], config)

    def independent(ours: list[Answer], theirs: list[Answer]) -> dict[str, dict[str, Any]]:
        return {j: _independent(ours, theirs, j, one_each=j in pairwise) for j in judges}

    def win_rates(policy: str) -> dict[str, dict[str, Any]]:
        rates = independent(answers[policy], drawn).items()
        return {j: r | {"paired": _paired(answers[policy], answers[baseline], j)} for j, r in rates}

    slices, pairs = {}, zip(answers[candidate], answers[baseline], strict=True)
    sources = sorted({a.source for a in drawn if a.source is not None})
    for source in sources if len(sources) > 1 else ():
        both = ([a for a in g if a.source == source] for g in (answers[candidate], drawn))
        shown = {j: {k: r[k] for k in (*ENDS, "n")} for j, r in independent(*both).items()}
        slices[source] = {"n": shown[judges[0]]["n"], "win_rates": shown}
    return {
        "candidate": candidate,
        "prompts": prompts,
        "answers_per_prompt": len(answers[baseline]) // prompts,
        "decoding": {
            "temperature": config.sampling.temperature,
            "max_response_tokens": config.sampling.max_response_tokens,
        },
        "judge": deciding_judge(standings),
        "judges": {judge: asdict(standing) for judge, standing in standings.items()},
        "rewards": list(rewards),
        "policies": policies,
        "win_rates": win_rates(candidate),
        "variants": {policy: win_rates(policy) for policy in variants},
        "slices": slices,
        "changes": changes,
        "differing": float(np.mean([a.response != b.response for a, b in pairs])),
        "smallest_visible_win_rate": smallest_visible_win_rate(prompts),
    }


def _metrics(
    answers: dict[str, list[Answer]], judges: Collection[str], config: "EvaluateConfig"
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """The metrics of each policy, and the changes of the accuracies if answers can be checked."""
    given = [answer for policy in answers.values() for answer in policy]
    shares = [judge for judge in judges if {a.scores[judge] for a in given} <= {0.0, 1.0}]
    policies = {name: summary(own, shares) for name, own in answers.items()}
    if GOLD in judges:
        policies = {name: own | gold_means(answers[name]) for name, own in policies.items()}
    by_truth = any(isinstance(judge, ReferenceReward) for judge in config.judges)
    if not by_truth or any(a.right is None for a in given):
        return policies, {}
    right = {name: accuracies(own) for name, own in answers.items()}
    for policy, found in right.items():
        for name, values in found.items():
            policies[policy] |= with_ends(name, share_with_interval(values))
    before, after, *_ = right.values()
    changes = {name: difference(values, before[name]) for name, values in after.items()}
    ends = ("change", "lower", "upper")
    return policies, {n: dict(zip(ends, own, strict=True)) for n, own in changes.items()}


def _independent(
    ours: list[Answer], theirs: list[Answer], judge: str, *, one_each: bool
) -> dict[str, Any]:
    """The win rate of independent draws, and the one that they would have at equal length."""
    scores = cross_pairs(scores_by(ours, judge), scores_by(theirs, judge), one_each=one_each)
    tokens = (by_prompt(given, lambda a: a.response_tokens) for given in (ours, theirs))
    extra = np.subtract(*cross_pairs(*tokens, one_each=one_each)).tolist()
    controlled = length_controlled(*scores, extra)
    return asdict(win_rate(*scores)) | {
        "length_controlled": controlled and dict(zip(ENDS, controlled, strict=True))
    }


def _paired(ours: list[Answer], theirs: list[Answer], judge: str) -> dict[str, Any]:
    scores = scores_by(ours, judge), scores_by(theirs, judge)
    rate, gain = win_rate(*scores), with_ends("gain", standardized_gain(*scores))
    return asdict(rate) | gain | {"p_value": sign_test(rate.wins, rate.losses)}


def summary(answers: list[Answer], shares: Collection[str] = ()) -> dict[str, float]:
    """Means over answers, scores and KL with their 95% intervals; the baseline's perplexity.

    KL and perplexity are missing if the baseline has other tokens than the policy, and the KL at
    temperature 0: it is a mean over sampled answers. Lengths and endings are missing if the answers
    are texts alone. The scores of the judges in `shares` are 0 or 1;
    with several answers to a prompt, their pass@k is `<judge>_pass_at_<k>` for k = 2, 4, ...
    `sft_perplexity`, per token, is high if SFT would hardly write the answers.
    """
    scores = {judge: scores_by(answers, judge) for judge in complete_judges(answers)}
    metrics: dict[str, float] = {}
    for judge, values in scores.items():
        measure = share_with_interval if judge in shares else mean_with_interval
        metrics |= with_ends(score_name(judge), measure(values))
    if all(a.kl is not None for a in answers):
        metrics |= with_ends("kl", mean_with_interval(by_prompt(answers, lambda a: a.kl)))
    for judge in shares:
        for k in (2**power for power in range(1, len(scores[judge][0]).bit_length())):
            measured = share_with_interval(scores[judge], k)
            metrics |= with_ends(f"{judge}{OF_SEVERAL}{k}", measured)
    texts, tokens = [a.response for a in answers], [a.response_tokens for a in answers]
    if all(a.sft_logprob is not None for a in answers):
        logprobs = sum(a.sft_logprob or 0.0 for a in answers)
        metrics["sft_perplexity"] = math.exp(-logprobs / sum(tokens))
    if answers[0].ended is not None:
        metrics |= {
            "response_tokens": float(np.mean(tokens)),
            "eos_fraction": float(np.mean([a.ended for a in answers])),
            "truncated_fraction": float(np.mean([not a.ended for a in answers])),
        }
    if all(a.episode is not None for a in answers):
        played = [a.episode or {} for a in answers]
        metrics |= {name: float(np.mean([one[name] for one in played])) for name in OF_EPISODES}
    return metrics | {
        "refusal_fraction": float(np.mean([refuses(text) for text in texts])),
        "distinct_1": distinct_n(texts, 1),
        "distinct_2": distinct_n(texts, 2),
        "repetition": float(np.mean([repetition(text) for text in texts])),
    }


def gold_means(answers: list[Answer]) -> dict[str, float]:
    """The mean of each part of the gold score, over the answers that have it."""
    from rlhf_pipeline.data.sources.synthetic import gold_parts  # here, for readers need it not

    found: dict[str, list[float]] = {}
    for a in answers:
        for part, value in gold_parts(a.source, a.messages or [], a.final).items():
            found.setdefault(f"gold_{part}", []).append(value)
    return {part: float(np.mean(values)) for part, values in found.items()}


def accuracies(answers: list[Answer]) -> dict[str, list[list[float]]]:
    """Whether the answers to each prompt are right: `strict_accuracy` and `lenient_accuracy`.

    With k answers to a prompt, `majority_at_<k>`: whether the most frequent of their final answers
    is strictly right; of equally frequent ones, the first.
    """
    found = {
        f"{kind}_accuracy": by_prompt(answers, lambda a, place=place: a.right[place])  # type: ignore[misc]
        for place, kind in enumerate(("strict", "lenient"))
    }
    given = by_prompt(answers, lambda a: final_answer(a.final).casefold())
    if (k := len(given[0])) > 1:
        most = [texts.index(Counter(texts).most_common(1)[0][0]) for texts in given]
        right = zip(found["strict_accuracy"], most, strict=True)
        found[f"{MAJORITY}{k}"] = [[values[place]] for values, place in right]
    return found


def with_ends(name: str, measured: Iterable[float]) -> dict[str, float]:
    """A metric and the ends of its interval."""
    return dict(zip((name, f"{name}_lower", f"{name}_upper"), measured, strict=True))


def best_of_n(draws: Sequence[list[Answer]]) -> list[dict[str, float]]:
    """The mean scores of the best of the first n `draws` of answers, for n = 1, 2, 4, ...

    The reward model chooses; without it, the first judge that scored every answer, the gold score
    last. A policy with this KL and lower scores got less out of the reward model than that choice:

        KL <= log n - (n - 1) / n

    Source: Stiennon et al. 2020, https://arxiv.org/abs/2009.01325, appendix G.3; that this is an
    upper bound: Beirami et al. 2024, https://arxiv.org/abs/2401.01879.
    """
    judges = complete_judges([a for given in draws for a in given])
    if not judges:
        raise StageError(
            "evaluate.best_of_n: found no judge that scores single answers, expected one to choose "
            "among them. Fix: add one to evaluate.judges, or set best_of_n to 0"
        )
    by, curve = min(judges, key=lambda judge: (judge != REWARD_MODEL, judge == GOLD)), []
    for n in (2**power for power in range(len(draws).bit_length())):
        tried = zip(*draws[:n], strict=True)
        best = [max(given, key=lambda a: float(a.scores[by] or 0)) for given in tried]
        curve.append(
            {"n": n, "kl": math.log(n) - (n - 1) / n}
            | {score_name(judge): float(np.mean(scores_by(best, judge))) for judge in judges}
            | with_ends(score_name(by), mean_with_interval(scores_by(best, by)))
        )
    return curve
