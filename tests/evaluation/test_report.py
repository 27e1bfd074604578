"""The words of an evaluation, in a terminal of 80 columns and in the table of metrics."""

import io
from copy import deepcopy

import pytest
from rich.console import Console

from rlhf_pipeline.evaluation.report import metric_rows, print_summary, verdict

EVALUATION = {
    "candidate": "ppo",
    "prompts": 400,
    "decoding": {"temperature": 0.7, "max_response_tokens": 64},
    "judge": "gold",
    "policies": {
        "sft": {
            "score": -1.5,
            "score_lower": -1.625,
            "score_upper": -1.375,
            "gold_score": 1.25,
            "kl": 0.0,
            "sft_perplexity": 6.5,
            "response_tokens": 125.25,
            "response_tokens_lower": 120.0,
            "response_tokens_upper": 130.5,
            "eos_fraction": 0.875,
            "distinct_1": 0.5,
            "distinct_2": 0.75,
        },
        "ppo": {
            "score": 2.0,
            "score_lower": 1.875,
            "score_upper": 2.125,
            "gold_score": 1.0,
            "kl": 0.5,
            "sft_perplexity": 5.0,
            "response_tokens": 98.0,
            "response_tokens_lower": 95.0,
            "response_tokens_upper": 101.0,
            "eos_fraction": 1.0,
            "distinct_1": 0.25,
            "distinct_2": 0.5,
            "refusals": 12,
        },
    },
    "win_rates": {
        "score": {
            "rate": 0.775,
            "lower": 0.731,
            "upper": 0.813,
            "wins": 300,
            "ties": 20,
            "losses": 80,
            "n": 400,
        },
        "gold": {
            "rate": 0.475,
            "lower": 0.427,
            "upper": 0.524,
            "wins": 180,
            "ties": 20,
            "losses": 200,
            "n": 400,
        },
    },
    "variants": {},
}

CAVEATS = {
    "score": "PPO was trained to maximize the score of the reward model, "
    "so this judge favours PPO.",
    "gold": "PPO never saw the scores of this judge.",
}

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

WINS, TIES, LOSSES = "\N{FULL BLOCK}" * 18, "\N{MEDIUM SHADE}" * 2, "\N{LIGHT SHADE}" * 20
TERMINAL = f"""\
By the gold judge, no difference is shown: it prefers PPO's answer to SFT's on
47.5% (95%: 42.7% to 52.4%) of 400 prompts. The reward model prefers it on 77.5%
(95%: 73.1% to 81.3%).
PPO {WINS}{TIES}{LOSSES} SFT  180 wins, 20 ties, 200 losses
"""


def printed(evaluation, caveats=CAVEATS):
    console = Console(file=io.StringIO(), width=80)
    print_summary(evaluation, caveats, console)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def test_the_metrics():
    assert metric_rows(EVALUATION) == ROWS


def test_tasks_come_after_the_known_metrics():
    name = "tasks/arc_easy/acc"
    found = deepcopy(EVALUATION)
    found["policies"]["sft"] |= {name: 0.75, f"{name}_lower": 0.7, f"{name}_upper": 0.8}
    found["policies"]["ppo"] |= {name: 0.7, f"{name}_lower": 0.65, f"{name}_upper": 0.75}
    row = ("task arc_easy/acc", "0.750 [0.700, 0.800]", "0.700 [0.650, 0.750]", "-0.050")
    assert metric_rows(found) == [*ROWS[:-1], row, ROWS[-1]]


def test_the_terminal():
    assert printed(EVALUATION) == TERMINAL


def test_the_verdict_of_the_reward_model_alone_has_its_caveat():
    rates = {"score": EVALUATION["win_rates"]["score"]}
    evaluation = EVALUATION | {"win_rates": rates, "judge": "score"}
    assert "so this judge favours PPO.\n" in printed(evaluation)


def test_another_candidate_is_called_by_its_name():
    evaluation = deepcopy(EVALUATION)
    evaluation["candidate"] = "dpo"
    evaluation["policies"]["dpo"] = evaluation["policies"].pop("ppo")
    caveats = {judge: caveat.replace("PPO", "DPO") for judge, caveat in CAVEATS.items()}
    assert metric_rows(evaluation) == ROWS
    terminal = printed(evaluation, caveats)
    assert terminal == TERMINAL.replace("PPO", "DPO")


def test_a_rounded_zero_has_no_sign():
    evaluation = deepcopy(EVALUATION)
    evaluation["policies"]["ppo"]["kl"] = -0.001
    assert ("KL from SFT (nats)", "0.00", "0.00", "+0.00") in metric_rows(evaluation)


def test_a_variant_is_shown_beside_the_candidate():
    evaluation = deepcopy(EVALUATION)
    evaluation["policies"]["ppo_ema"] = {"score": 2.5, "kl": 0.25}
    assert metric_rows(evaluation)[:2] == [
        ("reward model score", "-1.50 [-1.62, -1.38]", "2.00 [1.88, 2.12]", "2.50", "+3.50"),
        ("gold score", "1.25", "1.00", "-", "-0.25"),
    ]


def test_without_a_gold_score_nothing_mentions_gold():
    evaluation = deepcopy(EVALUATION)
    evaluation["judge"] = "score"
    for metrics in evaluation["policies"].values():
        del metrics["gold_score"]
    del evaluation["win_rates"]["gold"]
    assert not any("gold" in label for label, *_ in metric_rows(evaluation))
    assert "gold" not in printed(evaluation)


def test_a_function_judge_stands_beside_the_others_and_needs_no_caveat():
    evaluation = deepcopy(EVALUATION)
    evaluation["win_rates"]["words"] = evaluation["win_rates"]["gold"]
    evaluation["policies"]["sft"]["words_score"] = 2.0
    evaluation["policies"]["ppo"]["words_score"] = 3.5
    assert metric_rows(evaluation)[1:3] == [
        ("gold score", "1.25", "1.00", "-0.25"),
        ("words score", "2.00", "3.50", "+1.50"),
    ]
    assert "The words judge prefers it on" in printed(evaluation)


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
    found = verdict("gold", {"lower": lower, "upper": upper}, "ppo")
    assert found == f"By the gold judge, {expected}."


def test_several_answers_to_a_prompt_are_counted_as_pairs():
    found = " ".join(printed(EVALUATION | {"answers_per_prompt": 4}).split())
    assert "on 47.5% (95%: 42.7% to 52.4%) of 1600 pairs of answers to 400 prompts. " in found
