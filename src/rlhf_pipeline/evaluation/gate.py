"""The gate: whether a candidate replaces the champion, with every number that decided.

A candidate must beat the SFT baseline and the present champion on the same prompts, by a margin
that means something, and without a cheat that the judge does not see.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rlhf_pipeline.config.evaluate import REWARD_MODEL, RegisterConfig
from rlhf_pipeline.evaluation.comparison import Answer, judge_title, scores_by, summary
from rlhf_pipeline.statistics import standardized_gain, win_rate
from rlhf_pipeline.text_statistics import common_phrase


@dataclass(frozen=True)
class Evidence:
    """What is known about a candidate: answers of all policies to the same prompts, in order."""

    candidate: list[Answer]
    baseline: list[Answer]  # the answers of SFT, or without SFT those of the base model
    judge: str  # the judge that decides
    independent: bool  # whether the candidate's training has not optimized that judge
    against: str = "SFT"  # the baseline as it stands in a sentence
    champion: list[Answer] | None = None  # None: there is none, or the candidate is it
    champion_judge: str | None = None  # between candidate and champion; None: `judge`
    champion_fault: str | None = None  # why the present champion could not answer the prompts
    reward_model_accuracy: float | None = None
    """Lower end of the 95% interval on the reward model's accuracy. None: unknown."""
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The change of each task from SFT to the candidate, see `tasks.Tasks.add_to`."""
    tries: int = 1
    """Candidates registered with test prompts of these sources so far, this one included."""


@dataclass(frozen=True)
class Check:
    """One condition of the promotion."""

    what: str
    found: str
    expected: str
    parameter: str | None  # field of the block `register` that sets what is expected
    passed: bool

    def __str__(self) -> str:
        source = "" if self.parameter is None else f" (register.{self.parameter})"
        return f"{self.what}: found {self.found}, expected {self.expected}{source}"


@dataclass(frozen=True)
class Verdict:
    """All conditions, with the judge and the confidence that they were measured with."""

    judge: str
    independent: bool
    tries: int
    confidence: float  # of the intervals: 0.95 at the first try, more at every further one
    checks: tuple[Check, ...]

    @property
    def refusals(self) -> list[str]:
        return [str(check) for check in self.checks if not check.passed]

    def record(self) -> dict[str, Any]:
        checks = [asdict(check) for check in self.checks]
        return asdict(self) | {"checks": checks, "refusals": self.refusals}


def outcome(promoted: bool, refusals: Collection[str]) -> str:
    """Whether a candidate is the champion; by which parameter, if the conditions say otherwise."""
    found = "promoted" if promoted else "not promoted"
    overruled = f" (register.promote: {'always' if promoted else 'never'})"
    return found + (overruled if promoted == bool(refusals) else "")


def decide(evidence: Evidence, config: RegisterConfig) -> Verdict:
    """Apply every condition; the verdict promotes if all of them hold."""
    alpha = allowed_error(evidence.tries)
    checks = (*_comparisons(evidence, config, alpha), *_audits(evidence, config))
    return Verdict(evidence.judge, evidence.independent, evidence.tries, 1 - alpha, checks)


def allowed_error(tries: int) -> float:
    """Two-sided error of the interval at the k-th candidate for one test set.

        0.1 / (k (k + 1)):    0.05, 0.0167, 0.0083, ...

    Half of it promotes a candidate that is as good as the baseline. The halves of all candidates
    sum to less than 0.05, however many there are (alpha spending; Bonferroni's inequality).
    """
    return 0.1 / (tries * (tries + 1))


def _comparisons(evidence: Evidence, config: RegisterConfig, alpha: float) -> Iterator[Check]:
    """The candidate beats SFT and the champion, by a judge that can tell good answers from bad."""
    interval = f"the lower end of its {100 * (1 - alpha):.4g}% interval"
    judge, independent = evidence.judge, evidence.independent
    rivals = {evidence.against: (evidence.baseline, judge)}
    if evidence.champion is not None:
        rivals["the champion"] = evidence.champion, evidence.champion_judge or judge
    for name, (answers, by) in rivals.items():
        ours, theirs = (scores_by(given, by) for given in (evidence.candidate, answers))
        lower, bound = win_rate(ours, theirs, alpha).lower, config.min_win_rate_lower
        what = f"paired win rate against {name} by {judge_title(by)}"
        found, expected = f"{lower:.3f} as {interval}", f"more than {bound:g}"
        yield Check(what, found, expected, "min_win_rate_lower", lower > bound)
    if evidence.champion_fault is not None:
        found = f"no answers ({evidence.champion_fault})"
        expected = "answers to the same prompts. Fix: make its files readable again, or set "
        expected += "register.model to another name to keep both; register.promote: always "
        expected += "replaces it without a comparison"
        yield Check("the champion", found, expected, None, False)
    ours, theirs = (scores_by(given, judge) for given in (evidence.candidate, evidence.baseline))
    _, lower, _ = standardized_gain(ours, theirs, alpha)
    what = f"gain over {evidence.against} in units of the scores' spread"
    found, least = f"{lower:.2f} as {interval}", config.min_gain
    yield Check(what, found, f"at least {least:g}", "min_gain", lower >= least)
    if judge == REWARD_MODEL:
        what, found = "accuracy of the reward model, which decides", "no interval"
        accuracy = evidence.reward_model_accuracy
        if accuracy is not None:
            found = f"{accuracy:.3f} as the lower end of its 95% interval"
        passed = accuracy is not None and accuracy > 0.5
        yield Check(what, found, "more than 0.5, which is chance", None, passed)
    if config.require_independent_judge:
        found = judge + ("" if independent else ", which training has optimized")
        expected, parameter = "a judge that training has not optimized", "require_independent_judge"
        yield Check("judge that decides", found, expected, parameter, independent)


def _audits(evidence: Evidence, config: RegisterConfig) -> Iterator[Check]:
    """The candidate did not win by a known cheat, and has unlearned no task."""
    candidate, baseline, sft = evidence.candidate, evidence.baseline, evidence.against
    ours, theirs = summary(candidate), summary(baseline)
    pairs = zip(candidate, baseline, strict=True)
    changed = float(np.mean([a.response != b.response for a, b in pairs]))
    yield Check(f"answers that differ from {sft}'s", f"{changed:.0%}", "some", None, changed > 0)

    if "kl" in ours:  # policies with one token contract
        kl, most = ours["kl"], config.max_kl
        found = f"{kl:.2f} nats per response"
        yield Check(f"KL from {sft}", found, f"at most {most:g}", "max_kl", kl <= most)

    ratio, most = ours["response_tokens"] / theirs["response_tokens"], config.max_length_ratio
    what = f"length of an answer relative to {sft}'s"
    expected = f"between {1 / most:.2g} and {most:g}"
    yield Check(what, f"{ratio:.2f}", expected, "max_length_ratio", 1 / most <= ratio <= most)

    ends, least = ours["eos_fraction"], theirs["eos_fraction"] - config.max_eos_drop
    what, expected = "answers that end by themselves", f"at least {least:.1%}"
    yield Check(what, f"{ends:.1%}", expected, "max_eos_drop", ends >= least)

    repeated, most = ours["repetition"], theirs["repetition"] + config.max_repetition_rise
    what, expected = "repeated word triples of an answer", f"at most {most:.1%}"
    yield Check(what, f"{repeated:.1%}", expected, "max_repetition_rise", repeated <= most)

    phrase, share = common_phrase([answer.response for answer in candidate])
    # A part of the rest, because SFT may repeat itself: the bound stays below 1.
    most = theirs["phrase_share"] + config.max_phrase_rise * (1 - theirs["phrase_share"])
    what, found = "answers with the same phrase", f"{share:.1%} with {phrase!r}"
    yield Check(what, found, f"at most {most:.1%}", "max_phrase_rise", share <= most)

    own, unit = (float(np.std(scores_by(a, evidence.judge))) for a in (candidate, baseline))
    spread, least = own / unit if unit else math.inf, config.min_score_spread
    expected = f"at least {least:g}: a saturated judge gives all answers one score"
    what = f"spread of the scores relative to {sft}'s"
    yield Check(what, f"{spread:.2f}", expected, "min_score_spread", spread >= least)

    for name, task in evidence.tasks.items():
        change, interval = task["change"], f"{task['lower']:+.3f} to {task['upper']:+.3f}"
        what = f"{task['metric']} of task {name} against {sft}"
        found = f"{task['value']:.3f}, a change of {change:+.3f} (95%: {interval})"
        expected = f"a fall of at most {config.max_task_drop:g}"
        passed = change + config.max_task_drop > -1e-9  # differences of shares are rounded
        yield Check(what, found, expected, "max_task_drop", passed)
