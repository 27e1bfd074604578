"""The words of an evaluation, in a terminal of 80 columns and in the table of metrics."""

import io
from copy import deepcopy

import pytest
from rich.console import Console

from rlhf_pipeline.verdict.words import caveat, metric_rows, print_summary, road, summary, verdict

SFT = {
    "score": -1.5, "score_lower": -1.625, "score_upper": -1.375, "gold_score": 1.25, "kl": 0.0,
    "sft_perplexity": 6.5, "response_tokens": 125.25, "response_tokens_lower": 120.0,
    "response_tokens_upper": 130.5, "eos_fraction": 0.875, "distinct_1": 0.5, "distinct_2": 0.75,
}  # fmt: skip
PPO = {
    "score": 2.0, "score_lower": 1.875, "score_upper": 2.125, "gold_score": 1.0, "kl": 0.5,
    "sft_perplexity": 5.0, "response_tokens": 98.0, "response_tokens_lower": 95.0,
    "response_tokens_upper": 101.0, "eos_fraction": 1.0, "distinct_1": 0.25, "distinct_2": 0.5,
    "refusals": 12,
}  # fmt: skip


def rate(share, lower, upper, wins, losses, paired):
    found = {"rate": share, "lower": lower, "upper": upper, "length_controlled": None}
    counts = {"wins": wins, "ties": 20, "losses": losses, "n": 400}
    return found | counts | {"paired": dict(zip(("rate", "lower", "upper"), paired, strict=True))}


EVALUATION = {
    "candidate": "ppo", "judge": "gold", "prompts": 400, "answers_per_prompt": 1, "differing": 0.5,
    "decoding": {"temperature": 0.7, "max_response_tokens": 64},
    "judges": {
        "gold": {"state": "independent", "by": {}},
        "score": {"state": "optimized", "by": {"ppo": "rewards"}},
    },
    "policies": {"sft": SFT, "ppo": PPO},
    "win_rates": {
        "score": rate(0.775, 0.731, 0.813, 300, 80, (0.8, 0.75, 0.84)),
        "gold": rate(0.475, 0.427, 0.524, 180, 200, (0.5, 0.45, 0.55)),
    },
    "rewards": ["trained"], "variants": {},
}  # fmt: skip

ROWS = [
    ("reward model score", "-1.50 [-1.62, -1.38]", "2.00 [1.88, 2.12]", "+3.50"),
    ("gold score", "1.25", "1.00", "-0.25"),
    ("KL from SFT (nats)", "0.00", "0.50", "+0.50"),
    ("perplexity by SFT", "6.50", "5.00", "-1.50"),
    ("response tokens", "125.2 [120.0, 130.5]", "98.0 [95.0, 101.0]", "-27.2"),
    ("ended by itself", "0.875", "1.000", "+0.125"),
    ("distinct words", "0.500", "0.250", "-0.250"),
    ("distinct word pairs", "0.750", "0.500", "-0.250"),
    ("refusals", "-", "12", "-"),
]

TERMINAL = """\
PPO against the SFT model.
By the gold judge, no difference is shown: it prefers PPO's answer to SFT's on
47.5% (95%: 42.7% to 52.4%) of 400 prompts, and on 50.0% (95%: 45.0% to 55.0%)
with equal draws. The reward model prefers it on 77.5% (95%: 73.1% to 81.3%).
Prompts: 180 won, 20 tied, 200 lost
"""


def printed(evaluation):
    console = Console(file=io.StringIO(), width=80)
    print_summary(evaluation, console)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def sentences(evaluation):
    """What is printed, without line breaks."""
    return " ".join(printed(evaluation).split())


def test_tasks_come_after_the_known_metrics_and_a_variant_beside_the_candidate():
    name = "tasks/arc_easy/acc"
    found = deepcopy(EVALUATION)
    found["policies"]["sft"] |= {name: 0.75, f"{name}_lower": 0.7, f"{name}_upper": 0.8}
    found["policies"]["ppo"] |= {name: 0.7, f"{name}_lower": 0.65, f"{name}_upper": 0.75}
    row = ("task arc_easy/acc", "0.750 [0.700, 0.800]", "0.700 [0.650, 0.750]", "-0.050")
    assert metric_rows(EVALUATION) == ROWS and printed(EVALUATION) == TERMINAL
    assert metric_rows(found) == [*ROWS[:-1], row, ROWS[-1]]
    found["policies"]["ppo_ema"] = {"score": 2.5, "kl": 0.25}
    found["policies"]["ppo"]["kl"] = -0.001  # a rounded zero has no sign
    rows = metric_rows(found)
    assert rows[0] == (*ROWS[0][:3], "2.50", ROWS[0][3])
    assert rows[2] == ("KL from SFT (nats)", "0.00", "0.00", "0.25", "+0.00")


MAXIMIZED = "was trained to maximize the score of"
NOT = ", so this judge is not independent."


@pytest.mark.parametrize(
    ("state", "by", "rewards", "sentence"),
    [
        ("independent", {}, ["correct"], "No training has optimized this judge."),
        ("optimized", {"ppo": "rewards"}, ["trained"], f"PPO {MAXIMIZED} the reward model{NOT}"),
        ("optimized", {"ppo": "rewards"}, ["0.5 * trained", "-1 * length"],
         f"PPO {MAXIMIZED} 0.5 * the reward model and -1 * length{NOT}"),
        ("optimized", {"ppo": "comparisons"}, [],
         f"PPO learned from the same comparisons as the reward model{NOT}"),
        ("optimized", {"ppo": "earlier"}, ["correct"],
         f"PPO was made from a model that was trained on this judge{NOT}"),
        ("optimized", {"sft": "rewards", "ppo": "earlier"}, ["correct"],
         f"SFT {MAXIMIZED} this judge and PPO was made from a model that was trained on this "
         f"judge{NOT}"),
        ("unknown", {"sft": "unknown", "ppo": "unknown"}, [],
         "Nobody recorded whether the training of SFT and PPO optimized this judge, so it may not "
         "be independent."),
    ],
)  # fmt: skip
def test_the_verdict_says_where_the_judge_stands(state, by, rewards, sentence):
    rates = {"score": EVALUATION["win_rates"]["score"]}
    found = EVALUATION | {"win_rates": rates, "judge": "score", "rewards": rewards}
    found |= {"judges": {"score": {"state": state, "by": by}}}
    assert caveat(found, "score") == sentence
    assert (sentence in sentences(found)) == (state != "independent")


def test_the_verdict_says_where_length_explains_the_rate():
    found = deepcopy(EVALUATION)
    controlled = {"rate": 0.4, "lower": 0.35, "upper": 0.45}
    found["win_rates"]["gold"]["length_controlled"] = controlled
    assert (
        "With answers of equal length, it would prefer PPO's on 40.0% (95%: 35.0% to 45.0%), so "
        "length is a part of the difference." in sentences(found)
    )
    found["win_rates"]["gold"]["length_controlled"] = controlled | {"upper": 0.48}
    assert "equal length" not in printed(found)


HARDLY = "PPO hardly differs from SFT: "


@pytest.mark.parametrize(
    ("differing", "kl", "cut", "found"),
    [
        (0.004, 0.5, None,
         f"{HARDLY}KL 0.5 nats, and 0.4% of the answers with equal draws differ. Fix: train with"),
        (0.2, 0.0021, None,
         f"{HARDLY}KL 0.0021 nats, and 20.0% of the answers with equal draws differ. Fix"),
        (0.004, None, None, f"{HARDLY}0.4% of the answers with equal draws differ. Fix: train"),
        (0.2, 0.5, (0.98, 0.97),
         "Most answers of SFT and PPO were cut at 64 tokens (98% and 97%), so the judges compare"),
        (0.2, 0.5, (0.1, 0.9), "Most answers of PPO were cut at 64 tokens (90%), so the judges "),
        (0.2, 0.5, (0.5, 0.4), None),
    ],
)  # fmt: skip
def test_where_there_is_little_to_compare_a_sentence_says_so(differing, kl, cut, found):
    evaluation = deepcopy(EVALUATION)
    evaluation["differing"] = differing
    policies = evaluation["policies"]
    del policies["ppo"]["kl"]
    policies["ppo"] |= {} if kl is None else {"kl": kl, "kl_upper": kl}
    for policy, share in zip(policies.values(), cut or (), strict=False):
        policy["truncated_fraction"] = share
    words = sentences(evaluation)
    assert found in words if found else HARDLY not in words and "stumps" not in words


@pytest.mark.parametrize(
    ("learned", "found"),
    [
        ({"loss_before": 0.69315, "loss_after": 0.6931},
         "PPO hardly learned: the loss of its first batch was 0.693 and is 0.693."),
        ({"taught": 0.02},
         "PPO hardly learned: only 2.0% of its steps had groups of unequal scores."),
        ({"loss_before": 0.69315, "loss_after": 0.6866}, ""),
        ({"taught": 0.06}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_the_verdict_says_if_a_training_hardly_learned(learned, found):
    metrics = {f"learned/{name}": value for name, value in learned.items()}
    words = sentences(EVALUATION | {"learned": metrics})
    assert found in words and ("hardly learned" in words) == bool(found)


@pytest.mark.parametrize(
    ("candidate", "baseline", "titles", "found"),
    [
        ("distill", "sft", {}, "Distillation against the SFT model"),
        ("iterative_dpo", "sft", {}, "Iterative DPO against the SFT model"),
        ("base_model", "sft", {}, "The base model against the SFT model"),
        ("x", "y", {"x": "two", "y": "one"}, "two against one"),  # a user's own names
    ],
)
def test_a_road_begins_with_a_capital_letter(candidate, baseline, titles, found):
    policies = {baseline: SFT, candidate: PPO}
    assert road({"policies": policies, "candidate": candidate, "titles": titles}) == found


@pytest.mark.parametrize(
    ("titles", "name"),
    [({}, "base model"), ({"titles": {"base_model": "the instruct model"}}, "instruct model")],
)
def test_without_sft_the_baseline_is_the_base_model(titles, name):
    evaluation = EVALUATION | {"policies": {"base_model": SFT, "ppo": PPO}} | titles
    found = sentences(evaluation)
    assert found.startswith(f"PPO against the {name}. By the gold judge")
    assert f"prefers PPO's answer to the {name}'s on" in found
    assert "SFT" not in found
    labels = [label for label, *_ in metric_rows(evaluation)]
    assert f"KL from the {name} (nats)" in labels
    assert not any("SFT" in label for label in labels)


CHANGES = {
    "strict_accuracy": {"change": 0.21, "lower": 0.15, "upper": 0.2659},
    "lenient_accuracy": {"change": 0.012, "lower": -0.02, "upper": 0.044},
    "majority_at_4": {"change": 0.25, "lower": 0.125, "upper": 0.375},
}
FORMAT = (
    "The gain in accuracy is one of format: strict +0.210 [+0.150, +0.266], lenient +0.012 "
    "[-0.020, +0.044]."
)


@pytest.mark.parametrize(
    ("strict", "lenient", "expected"),
    [
        ({}, {}, FORMAT),
        ({"lower": -0.01}, {}, None),
        ({}, {"lower": 0.001}, None),
        ({"lower": -0.01}, {"lower": 0.001}, None),
        ({"change": -0.21, "lower": -0.2659, "upper": -0.15}, {},
         FORMAT.replace("gain", "loss").replace("+0.210 [+0.150, +0.266]",
                                                "-0.210 [-0.266, -0.150]")),
    ],
)  # fmt: skip
def test_a_change_of_the_strict_accuracy_alone_is_one_of_format(strict, lenient, expected):
    kinds = {"strict_accuracy": strict, "lenient_accuracy": lenient}
    changes = {name: CHANGES[name] | changed for name, changed in kinds.items()}
    words = summary(EVALUATION | {"changes": changes})
    assert (expected in words) if expected else ("format" not in words)


def test_accuracies_and_their_differences_stand_in_the_terminal_and_on_the_page():
    found = deepcopy(EVALUATION) | {"changes": CHANGES, "answers_per_prompt": 4}
    found["policies"]["ppo"]["last_number_pass_at_4"] = 0.5
    assert "of 400 prompts with 4 answers of each policy, and on" in sentences(found)
    for policy, values in zip(found["policies"].values(), ((0.2, 0.4), (0.41, 0.65)), strict=True):
        for name, value in zip(("strict_accuracy", "majority_at_4"), values, strict=True):
            policy |= {name: value, f"{name}_lower": value - 0.05, f"{name}_upper": value + 0.05}
    rows = metric_rows(found)
    strict = ("strict accuracy", "0.200 [0.150, 0.250]", "0.410 [0.360, 0.460]",
              "+0.210 [+0.150, +0.266]")  # fmt: skip
    assert rows[-4:-1] == [
        strict,
        ("last_number pass@4", "-", "0.500", "-"),
        ("majority@4", "0.400 [0.350, 0.450]", "0.650 [0.600, 0.700]", "+0.250 [+0.125, +0.375]"),
    ]
    assert printed(found).splitlines()[-3:] == [
        "                 SFT    PPO    difference",
        "strict accuracy  0.200  0.410  +0.210 [+0.150, +0.266]",
        "majority@4       0.400  0.650  +0.250 [+0.125, +0.375]",
    ]


@pytest.mark.parametrize(
    ("lower", "upper", "expected"),
    [
        (0.501, 0.6, "PPO is better"),
        (0.5, 0.6, "no difference is shown"),
        (0.4, 0.5, "no difference is shown"),
        (0.4, 0.499, "PPO is worse"),
    ],
)
def test_the_verdict_needs_the_whole_interval(lower, upper, expected):
    found = verdict("gold", {"lower": lower, "upper": upper}, "PPO")
    assert found == f"By the gold judge, {expected}."
