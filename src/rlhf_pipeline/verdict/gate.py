"""The gate: whether a candidate replaces the champion, with every number that decided.

A candidate must beat the SFT baseline and the present champion on the same prompts, by a margin
that means something, and without a cheat that the judge does not see.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rlhf_pipeline.config.evaluate import RegisterConfig
from rlhf_pipeline.verdict.answers import Answer, by_prompt, judge_title, scores_by
from rlhf_pipeline.verdict.comparison import Standing, State, accuracies, summary
from rlhf_pipeline.verdict.statistics import (
    difference,
    length_controlled,
    standardized_gain,
    win_rate,
)

STATES: Mapping[State, str] = {
    "independent": "which no training has optimized",
    "optimized": "which training has optimized",
    "unknown": "which training may have optimized, for the records do not exclude it",
}
"""The standing of a judge in words."""
BY_JUDGE: Mapping[State, str] = {
    "independent": "",
    "optimized": " by the judge that it was trained on",
    "unknown": " by a judge that it may have been trained on",
}
"""What a promotion by such a judge is called."""
ADVICE: Mapping[State, str] = {
    "independent": "",
    "optimized": ". Fix: add an independent judge to evaluate.judges, hold comparisons back for "
    "one (evaluate.judge_model: {held_back: 0.5}), or set register.require_independent_judge to "
    "false",
    "unknown": ". Fix: let another judge decide; or if you know that no training has optimized "
    "this one, set register.require_independent_judge to false",
}


@dataclass(frozen=True)
class Evidence:
    """What is known about a candidate: answers of all policies to the same prompts, in order."""

    candidate: list[Answer]
    baseline: list[Answer]  # the answers of SFT, or without SFT those of the base model
    judge: str  # the judge that decides
    standing: Standing  # of that judge
    met: list[Answer] | None = None
    """The baseline's answers that a judge of pairs saw beside the candidate's. None: another judge
    decides, which scores single answers."""
    against: str = "SFT"  # the baseline as it stands in a sentence
    champion: list[Answer] | None = None  # None: there is none, or the candidate is it
    champion_judge: str | None = None  # between candidate and champion; None: `judge`
    champion_fault: str | None = None  # why the present champion could not answer the prompts
    accuracy: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    """Of each reward model of the pipeline that decides or whose scores training maximized: see
    `evaluate.accuracy_of`."""
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The change of each task from SFT to the candidate, see `evaluate.add_tasks`."""
    hardly_learned: str = ""  # see `words.hardly_learned`
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
    state: State  # of the judge
    tries: int
    confidence: float  # of the intervals: 0.95 at the first attempt, more at each further one
    checks: tuple[Check, ...]

    @property
    def refusals(self) -> list[str]:
        return [str(check) for check in self.checks if not check.passed]

    def record(self) -> dict[str, Any]:
        checks = [asdict(check) for check in self.checks]
        return asdict(self) | {"checks": checks, "refusals": self.refusals}


def outcome(promoted: bool, verdict: Mapping[str, Any]) -> str:
    """Whether a candidate is the champion; by which parameter, if the conditions say otherwise.

    `verdict` is a `Verdict.record`. A judge that is not independent is a part of the outcome.
    """
    found = "promoted" if promoted else "not promoted"
    overruled = f" (register.promote: {'always' if promoted else 'never'})"
    by = BY_JUDGE[verdict["state"]] if promoted else ""
    return found + by + (overruled if promoted == bool(verdict["refusals"]) else "")


def decide(evidence: Evidence, config: RegisterConfig) -> Verdict:
    """Apply every condition; the verdict promotes if all of them hold."""
    alpha = allowed_error(evidence.tries)
    judging, audits = _judging(evidence, config), _audits(evidence, config)
    checks = (*_comparisons(evidence, config, alpha), *judging, *audits)
    return Verdict(evidence.judge, evidence.standing.state, evidence.tries, 1 - alpha, checks)


def allowed_error(tries: int) -> float:
    """Two-sided error of the interval at the k-th candidate for one test set.

        0.1 / (k (k + 1)):    0.05, 0.0167, 0.0083, ...

    Half of it promotes a candidate that is as good as the baseline. The halves of all candidates
    sum to less than 0.05, however many there are (alpha spending; Bonferroni's inequality).
    """
    return 0.1 / (tries * (tries + 1))


def _comparisons(evidence: Evidence, config: RegisterConfig, alpha: float) -> Iterator[Check]:
    """The candidate beats SFT and the champion, and not by length alone."""
    interval = f"the lower end of its {100 * (1 - alpha):.4g}% interval"
    judge = evidence.judge
    rivals = {evidence.against: (evidence.baseline, judge, evidence.met or evidence.baseline)}
    if (champion := evidence.champion) is not None:
        rivals["the champion"] = champion, evidence.champion_judge or judge, champion
    for name, (answers, by, met) in rivals.items():
        ours, theirs = (scores_by(given, by) for given in (evidence.candidate, answers))
        what = f"paired win rate against {name} by {judge_title(by)}"
        measured = {"min_win_rate_lower": (what, win_rate(ours, theirs, alpha).lower)}
        if config.min_length_controlled_lower:
            lower = _at_equal_length(evidence.candidate, met, by, alpha)
            what = f"win rate against {name} at equal length"
            measured["min_length_controlled_lower"] = what, lower
        for parameter, (what, lower) in measured.items():
            bound = getattr(config, parameter)
            found, expected = f"{lower:.3f} as {interval}", f"more than {bound:g}"
            yield Check(what, found, expected, parameter, lower > bound)
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


def _judging(evidence: Evidence, config: RegisterConfig) -> Iterator[Check]:
    """The judge can tell good answers from bad, and no training has optimized it."""
    judge = evidence.judge
    if judge in evidence.accuracy:
        lower = evidence.accuracy[judge]["margin"]["lower"]
        what = f"preference of {judge_title(judge)} for the chosen answers"
        found = f"{lower:.3f} as the lower end of the 95% interval of its margin"
        yield Check(what, found, "more than 0, which is chance", None, lower > 0)
    for name, measured in evidence.accuracy.items():
        least, over = config.min_accuracy_over_length, measured.get("over_length")
        if over is not None and least is not None:
            what = f"accuracy of {judge_title(name)} above that of the longer answer"
            found = f"{over['lower']:+.3f} as the lower end of its 95% interval"
            expected = f"more than {least:g}: else it may measure length alone"
            yield Check(what, found, expected, "min_accuracy_over_length", over["lower"] > least)
    if config.require_independent_judge:
        state = evidence.standing.state
        found, passed = f"{judge_title(judge)}, {STATES[state]}", state == "independent"
        expected = f"one that no training has optimized{ADVICE[state]}"
        yield Check("judge that decides", found, expected, "require_independent_judge", passed)


def _audits(evidence: Evidence, config: RegisterConfig) -> Iterator[Check]:
    """The candidate did not win by a known cheat, and has unlearned no task."""
    candidate, baseline, sft = evidence.candidate, evidence.baseline, evidence.against
    ours, theirs = summary(candidate), summary(baseline)
    pairs = zip(candidate, baseline, strict=True)
    changed = float(np.mean([a.response != b.response for a, b in pairs]))
    yield Check(f"answers that differ from {sft}'s", f"{changed:.0%}", "some", None, changed > 0)
    if shown := evidence.hardly_learned:
        yield Check("what the candidate learned", f"little ({shown})", "more", None, False)

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

    own, unit = (float(np.std(scores_by(a, evidence.judge))) for a in (candidate, baseline))
    spread, least = own / unit if unit else math.inf, config.min_score_spread
    expected = f"at least {least:g}: a saturated judge gives all answers one score"
    what = f"spread of the scores relative to {sft}'s"
    yield Check(what, f"{spread:.2f}", expected, "min_score_spread", spread >= least)

    changes = _right_answers(baseline, candidate)
    for name, task in evidence.tasks.items():
        changes[f"{task['metric']} of task {name}"] = task["change"], task["lower"], task["upper"]
    for name, (change, lower, upper) in changes.items():
        found = f"a change of {change:+.3f} (95%: {lower:+.3f} to {upper:+.3f})"
        expected = f"a fall of at most {config.max_task_drop:g}"
        passed = change + config.max_task_drop > -1e-9  # differences of shares are rounded
        yield Check(f"{name} against {sft}", found, expected, "max_task_drop", passed)


def _at_equal_length(
    candidate: list[Answer], rival: list[Answer], judge: str, alpha: float
) -> float:
    """The lower end of the interval on the win rate at equal length.

    Where it cannot be estimated, because length tells wins from losses or all are wins, it is that
    on the prompts where the candidate's answer is not longer, and 0 without such prompts.
    """
    ours, theirs = scores_by(candidate, judge), scores_by(rival, judge)
    longer, shorter = (
        by_prompt(given, lambda a: a.response_tokens) for given in (candidate, rival)
    )
    extra = np.array(longer) - np.array(shorter)
    controlled = length_controlled(ours, theirs, extra.tolist(), alpha)
    if controlled is not None:
        return controlled[1]
    kept = np.flatnonzero(extra.mean(1) <= 0).tolist()
    left = [ours[row] for row in kept], [theirs[row] for row in kept]
    return win_rate(*left, alpha).lower if kept else 0.0


def _right_answers(
    baseline: list[Answer], candidate: list[Answer]
) -> dict[str, tuple[float, float, float]]:
    """The change of the strict and the lenient accuracy, on prompts with a true answer."""
    unknown = {answer.row for answer in (*baseline, *candidate) if answer.right is None}
    both = ([a for a in given if a.row not in unknown] for given in (baseline, candidate))
    before, after = (accuracies(given) if given else {} for given in both)
    kinds = [kind for kind in ("strict_accuracy", "lenient_accuracy") if kind in before]
    return {kind.replace("_", " "): difference(after[kind], before[kind]) for kind in kinds}
