"""The words of an evaluation: the candidate, PPO or DPO, beside SFT or the base model.

The evaluation is a dict of JSON types, see `comparison.compare`:

    policies    by policy, the baseline first: metrics; `m_lower` and `m_upper` are the 95% interval
                of the metric `m`
    win_rates   of the candidate against SFT, by judge: of answers that were drawn independently;
                `paired` is that of answers with equal draws, with its test and the gain
    variants    win rates by judge, by variant of the candidate, such as "ppo_ema"
    differing   share of the candidate's answers that differ from the baseline's of equal draws
    changes     accuracies of the candidate minus the baseline's, on the same prompts: `change`,
                `lower` and `upper` by metric
    judge       the judge that decides about a promotion
    judges      the standing of each judge, see `comparison.Standing`
    rewards     names of the rewards that the candidate's last training maximized
    accuracy    held-out accuracy of each judge that is a reward model of the pipeline, see
                `evaluate.accuracy_of`
    titles      names of policies as they stand in a sentence, where `title` has not the right one
    learned     the metrics `learned/...` of the candidate's training, if it has any
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_pipeline.config.evaluate import REWARD_MODEL
from rlhf_pipeline.verdict.answers import judge_title, score_name
from rlhf_pipeline.verdict.comparison import (
    BASE_MODEL,
    BASELINE,
    MAJORITY,
    OF_SEVERAL,
    baseline_of,
    reward_title,
)

METRICS = {  # label and number format; z: a rounded zero has no sign
    "gold_core": ("gold score of the core", "z.2f"),
    "gold_hint": ("gold score of hints", "z.2f"),
    "gold_courtesy": ("gold score of courtesies", "z.2f"),
    "gold_surplus": ("gold score of surplus words", "z.2f"),
    "gold_right_answers": ("right answers to harmless requests", "z.3f"),
    "gold_right_refusals": ("refusals of harmful requests", "z.3f"),
    "kl": ("KL from SFT (nats)", "z.2f"),
    "sft_perplexity": ("perplexity by SFT", "z.2f"),
    "response_tokens": ("response tokens", "z.1f"),
    "turns": ("turns", "z.2f"),
    "calls": ("calls of tools, steps of the environment", "z.2f"),
    "malformed": ("calls that could not be read", "z.2f"),
    "failed": ("calls that failed", "z.2f"),
    "eos_fraction": ("ended by itself", "z.3f"),
    "truncated_fraction": ("cut at the limit", "z.3f"),
    "refusal_fraction": ("opens like a refusal", "z.3f"),
    "distinct_1": ("distinct words", "z.3f"),
    "distinct_2": ("distinct word pairs", "z.3f"),
    "repetition": ("repeated word triples of an answer", "z.3f"),
}

SHARES = {
    "_accuracy": " accuracy", OF_SEVERAL: " pass@", MAJORITY: "majority@", "tasks/": "task ",
}  # fmt: skip
"""What stands in the names of further metrics, which are shares, and in their labels."""

ABSENT = "-"
SMALL_KL = 0.02
"""KL in nats below which two policies are hardly different: by Pinsker's inequality, no judge
prefers one of them on more than 60%. So it is if few of their answers to the same draws differ."""
FEW_DIFFER = 0.05  # share of answers, and of steps that teach
SMALL_FALL = 0.005  # of a loss, relative
TITLES = {
    "rejection": "rejection sampling", "iterative_dpo": "iterative DPO", "distill": "distillation",
}  # fmt: skip


def print_summary(evaluation: dict[str, Any], console: Console) -> None:
    """Print the road, the verdict by each judge, the counts of the deciding one, and accuracies."""
    console.print(Text(f"{road(evaluation)}.", "bold"))
    console.print(Text(summary(evaluation)))
    names, rate = titles(evaluation), evaluation["win_rates"][evaluation["judge"]]
    console.print("Prompts: {wins} won, {ties} tied, {losses} lost".format(**rate))
    if changes := evaluation.get("changes"):
        policies = (name.removeprefix("the ") for name in names.values())
        table = Table("", *policies, "difference", box=None, pad_edge=False)
        for label, *values, difference in metric_rows(evaluation, changes):
            shown = (value.partition(" [")[0] for value in values)  # the page has their intervals
            table.add_row(label, *shown, difference)
        console.print(table)


def road(evaluation: Mapping[str, Any]) -> str:
    """What was compared with what: "GRPO against the instruct model"."""
    names, policy = titles(evaluation), baseline_of(evaluation)
    baseline = f"the {names[policy]} model" if policy == BASELINE else names[policy]
    return sentence(f"{names[evaluation['candidate']]} against {baseline}")


def summary(evaluation: dict[str, Any]) -> str:
    """The verdict of the deciding judge with what limits it; then the other judges."""
    names, deciding = titles(evaluation), evaluation["judge"]
    policy, baseline = names[evaluation["candidate"]], names[baseline_of(evaluation)]
    rate = evaluation["win_rates"][deciding]
    paired, controlled = rate["paired"], rate["length_controlled"]
    found = verdict(deciding, rate, policy).removesuffix(".")
    found += f": it prefers {policy}'s answer to {baseline}'s on "
    found += f"{_interval(rate)} of {counted(rate['n'], evaluation['answers_per_prompt'])}"
    if paired["rate"] != rate["rate"]:
        found += f", and on {_interval(paired)} with equal draws"
    sentences = [f"{found}."]
    if evaluation["judges"][deciding]["state"] != "independent":
        sentences.append(caveat(evaluation, deciding))
    if controlled and not controlled["lower"] <= rate["rate"] <= controlled["upper"]:
        sentences.append(
            f"With answers of equal length, it would prefer {policy}'s on {_interval(controlled)}, "
            "so length is a part of the difference."
        )
    sentences += _of_format(evaluation.get("changes", {}))
    for judge, other in evaluation["win_rates"].items():
        if judge != deciding:
            sentences.append(f"{judge_title(judge).capitalize()} prefers it on {_interval(other)}.")
    return " ".join([*sentences, *_little_to_compare(evaluation)])


def _of_format(changes: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A sentence if the strict accuracy has changed and the lenient one not, by their intervals."""
    kinds = [changes[f"{kind}_accuracy"] for kind in ("strict", "lenient") if changes]
    if [each["lower"] <= 0 <= each["upper"] for each in kinds] != [False, True]:
        return []
    word = "gain" if kinds[0]["change"] > 0 else "loss"
    strict, lenient = (_change(each, "+.3f") for each in kinds)
    return [f"The {word} in accuracy is one of format: strict {strict}, lenient {lenient}."]


def _little_to_compare(evaluation: Mapping[str, Any]) -> Iterator[str]:
    """Sentences if the policies hardly differ, and if most answers of one were cut."""
    names, policies, candidate = titles(evaluation), evaluation["policies"], evaluation["candidate"]
    ours, baseline = policies[candidate], baseline_of(evaluation)
    if shown := hardly_learned(evaluation.get("learned", {})):
        yield f"{sentence(names[candidate])} hardly learned: {shown}."
    differ = evaluation["differing"]
    if differ < FEW_DIFFER or ours.get("kl_upper", 1.0) < SMALL_KL:
        kl = f"KL {ours['kl']:z.2g} nats, and " if "kl" in ours else ""
        yield (
            f"{sentence(names[candidate])} hardly differs from {names[baseline]}: {kl}{differ:.1%} "
            "of the answers with equal draws differ. Fix: train with a higher learning rate or "
            "more steps."
        )
    of = {
        names[each]: policies[each].get("truncated_fraction", 0) for each in (baseline, candidate)
    }
    if cut := {name: share for name, share in of.items() if share > 0.5}:
        shares = " and ".join(f"{share:.0%}" for share in cut.values())
        limit = evaluation["decoding"]["max_response_tokens"]
        yield (
            f"Most answers of {' and '.join(cut)} were cut at {limit} tokens ({shares}), so the "
            "judges compare stumps. Fix: raise evaluate.sampling.max_response_tokens, or train "
            "until answers end by themselves."
        )


def hardly_learned(metrics: Mapping[str, float]) -> str:
    """What shows that a training hardly learned, by the metrics of its model; empty if nothing."""
    if (taught := metrics.get("learned/taught", 1.0)) < FEW_DIFFER:
        return f"only {taught:.1%} of its steps had groups of unequal scores"
    before, after = metrics.get("learned/loss_before", 0.0), metrics.get("learned/loss_after", 1.0)
    is_small = abs(before - after) <= SMALL_FALL * abs(before)
    return f"the loss of its first batch was {before:.3f} and is {after:.3f}" if is_small else ""


def _change(change: Mapping[str, float], form: str) -> str:
    return "{change:F} [{lower:F}, {upper:F}]".replace("F", form).format(**change)


class Evaluation(dict[str, Any]):
    """An evaluation as above, with its verdict in words and the rate of its deciding judge."""

    @property
    def summary(self) -> str:
        return summary(self)

    @property
    def win_rate(self) -> dict[str, Any]:
        return dict(self["win_rates"][self["judge"]])


def caveat(evaluation: Mapping[str, Any], judge: str) -> str:
    """Whether training has optimized a judge, and by what, in a sentence or two."""
    names, standing = titles(evaluation), evaluation["judges"][judge]
    if standing["state"] == "independent":
        return "No training has optimized this judge."
    if standing["state"] == "unknown":
        policies = " and ".join(names[policy] for policy in standing["by"])
        return (
            f"Nobody recorded whether the training of {policies} optimized this judge, so it may "
            "not be independent."
        )
    maximized = "this judge"
    if standing["by"] == {evaluation["candidate"]: "rewards"}:
        maximized = reward_title(evaluation["rewards"])
    how = {
        "rewards": f"was trained to maximize the score of {maximized}",
        "comparisons": f"learned from the same comparisons as {judge_title(judge)}",
        "earlier": "was made from a model that was trained on this judge",
    }
    found = [f"{names[policy]} {how[way]}" for policy, way in standing["by"].items()]
    return sentence(f"{' and '.join(found)}, so this judge is not independent.")


def sentence(text: str) -> str:
    """The text with a capital letter, unless a user's own name is its first word."""
    return text[0].upper() + text[1:] if text.startswith(("the ", *TITLES.values())) else text


def counted(prompts: int, answers: int) -> str:
    """The number of prompts, and of answers to each, that a win rate counts."""
    return f"{prompts} prompts" + (f" with {answers} answers of each policy" if answers > 1 else "")


def _interval(rate: dict[str, float]) -> str:
    return f"{rate['rate']:.1%} (95%: {rate['lower']:.1%} to {rate['upper']:.1%})"


def title(policy: str) -> str:
    """The name of a policy as it stands in a sentence."""
    name = policy.replace("_", " ")
    if policy in (BASE_MODEL, "baseline", "candidate"):
        return f"the {name}"
    return TITLES.get(policy, name.upper())


def titles(evaluation: Mapping[str, Any]) -> dict[str, str]:
    """The `title` of each policy of an evaluation; that of a base model says if it can chat."""
    return {name: title(name) for name in evaluation["policies"]} | evaluation.get("titles", {})


def metric_rows(
    evaluation: dict[str, Any], only: Collection[str] | None = None
) -> list[tuple[str, ...]]:
    """Every metric, or some: label, value for each policy, and the candidate's minus SFT's."""
    changes = evaluation.get("changes", {})
    policies, candidate = evaluation["policies"], evaluation["candidate"]
    baseline, names = baseline_of(evaluation), titles(evaluation)
    present = dict.fromkeys(
        name for metrics in policies.values() for name in metrics
        if not name.endswith(("_lower", "_upper")) and (only is None or name in only)
    )  # fmt: skip
    known = {
        score_name(judge): (f"{'reward model' if judge == REWARD_MODEL else judge} score", "z.2f")
        for judge in evaluation["win_rates"]
    } | {n: (label.replace("SFT", names[baseline]), form) for n, (label, form) in METRICS.items()}
    for mark, word in SHARES.items():
        known |= {n: (n.replace(mark, word, 1), "z.3f") for n in present if mark in n}
    rows = []
    for name in [*filter(present.__contains__, known), *(n for n in present if n not in known)]:
        label, form = known.get(name, (name.replace("_", " "), ".4g"))
        difference = ABSENT
        if name in changes:
            difference = _change(changes[name], f"+{form}")
        elif name in policies[candidate] and name in policies[baseline]:
            difference = f"{policies[candidate][name] - policies[baseline][name]:+{form}}"
        values = (metric_value(metrics, name, form) for metrics in policies.values())
        rows.append((label, *values, difference))
    return rows


def metric_value(metrics: Mapping[str, float], name: str, form: str) -> str:
    """A metric with its interval."""
    if name not in metrics:
        return ABSENT
    ends = (f"{name}_lower", f"{name}_upper")
    interval = ", ".join(f"{metrics[end]:{form}}" for end in ends if end in metrics)
    return f"{metrics[name]:{form}}" + (f" [{interval}]" if interval else "")


def verdict(judge: str, rate: dict[str, float], policy: str) -> str:
    """Whether the whole interval of a win rate is on one side, in a sentence."""
    found = "no difference is shown"
    if rate["lower"] > 0.5 or rate["upper"] < 0.5:
        found = f"{policy} is {'better' if rate['lower'] > 0.5 else 'worse'}"
    return f"By {judge_title(judge)}, {found}."
