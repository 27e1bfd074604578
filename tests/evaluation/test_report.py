"""The text of the report, word for word, in Markdown and in a terminal of 80 columns."""

import io
from copy import deepcopy

import pytest
from rich.console import Console

from rlhf_pipeline.evaluation.report import print_summary, render_markdown

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
    "samples": [
        {
            "prompt": "Say a|b\nand *c*",
            "sft": "a|b <b> & $x$",
            "ppo": "back\\slash [link](url)",
            "sft_score": -1.0,
            "ppo_score": 2.0,
            "sft_gold": 1.0,
            "ppo_gold": 0.5,
        },
        {
            "prompt": "Hello",
            "sft": "Hi.",
            "ppo": "",
            "sft_score": 0.0,
            "ppo_score": 0.125,
            "sft_gold": None,
            "ppo_gold": None,
        },
    ],
    "largest_gains": [{"prompt": "Up", "sft": "bad", "ppo": "good", "sft_gold": 0, "ppo_gold": 1}],
    "largest_losses": [{"prompt": "Down", "sft": "ok", "ppo": "no", "sft_gold": 1, "ppo_gold": 0}],
}

SAMPLES = ("samples", "largest_gains", "largest_losses")

CAVEATS = {
    "score": "PPO was trained to maximize the score of the reward model, "
    "so this judge favours PPO.",
    "gold": "PPO never saw the scores of this judge.",
}

MARKDOWN = r"""# PPO against SFT

Both answered the same 400 held-out prompts (temperature 0.7, max_response_tokens 64).

| | SFT | PPO | difference |
|:---|---:|---:|---:|
| reward model score | -1.50 [-1.62, -1.38] | 2.00 [1.88, 2.12] | +3.50 |
| gold score | 1.25 | 1.00 | -0.25 |
| KL from SFT (nats) | 0.00 | 0.50 | +0.50 |
| perplexity by SFT | 6.50 | 5.00 | -1.50 |
| response tokens | 125.2 [120.0, 130.5] | 98.0 [95.0, 101.0] | -27.2 |
| ended by itself | 0.875 | 1.000 | +0.125 |
| distinct words | 0.500 | 0.250 | -0.250 |
| distinct word pairs | 0.750 | 0.500 | -0.250 |
| refusals | - | 12 | - |

Intervals are 95%.

![Win rates, scores and KL](comparison.png)

## Which answer is better?

Two equal policies have 50%; a tie counts half. With this number of prompts, four of five evaluations show that a policy with a true win rate of 57.0% is better.

**By the reward model, PPO is better.** It prefers PPO's answer to SFT's on 77.5% (95%: 73.1% to 81.3%) of 400 prompts: 300 wins, 20 ties, 80 losses. PPO was trained to maximize the score of the reward model, so this judge favours PPO.

**By the gold judge, no difference is shown.** It prefers PPO's answer to SFT's on 47.5% (95%: 42.7% to 52.4%) of 400 prompts: 180 wins, 20 ties, 200 losses. PPO never saw the scores of this judge.

## Largest gains by the gold judge

| | prompt | SFT | PPO |
|---:|:---|:---|:---|
| 1 | Up | bad<br>(gold 0.00) | good<br>(gold 1.00) |

## Largest losses by the gold judge

| | prompt | SFT | PPO |
|---:|:---|:---|:---|
| 1 | Down | ok<br>(gold 1.00) | no<br>(gold 0.00) |

## Samples

| | prompt | SFT | PPO |
|---:|:---|:---|:---|
| 1 | Say a\|b<br>and \*c\* | a\|b &lt;b> &amp; \$x\$<br>(score -1.00, gold 1.00) | back\\slash \[link\](url)<br>(score 2.00, gold 0.50) |
| 2 | Hello | Hi.<br>(score 0.00) | <br>(score 0.12) |
"""  # noqa: E501

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


def test_the_markdown():
    assert render_markdown(EVALUATION, CAVEATS) == MARKDOWN


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
    for name in SAMPLES:
        evaluation[name] = [
            {key.replace("ppo", "dpo"): value for key, value in pair.items()}
            for pair in evaluation[name]
        ]
    caveats = {judge: caveat.replace("PPO", "DPO") for judge, caveat in CAVEATS.items()}
    assert render_markdown(evaluation, caveats) == MARKDOWN.replace("PPO", "DPO")
    terminal = printed(evaluation, caveats)
    assert terminal == TERMINAL.replace("PPO", "DPO")


def test_a_comparison_without_losses_says_so_and_a_rounded_zero_has_no_sign():
    evaluation = deepcopy(EVALUATION) | {"largest_losses": []}
    evaluation["policies"]["ppo"]["kl"] = -0.001
    report = render_markdown(evaluation, CAVEATS)
    assert "## Largest losses by the gold judge\n\nNone.\n\n## Samples" in report
    assert "| KL from SFT (nats) | 0.00 | 0.00 | +0.00 |" in report


def test_a_variant_is_shown_beside_the_candidate():
    evaluation = deepcopy(EVALUATION)
    evaluation["policies"]["ppo_ema"] = {"score": 2.5, "kl": 0.25}
    evaluation["variants"] = {"ppo_ema": {"score": evaluation["win_rates"]["score"]}}
    sentence = (
        "The reward model prefers PPO EMA's answer to SFT's on 77.5% (95%: 73.1% to 81.3%) of "
        "400 prompts."
    )
    rows = (
        "| reward model score | 2.00 [1.88, 2.12] | 2.50 | +0.50 |\n| gold score | 1.00 | - | - |\n"
    )
    markdown = render_markdown(evaluation, CAVEATS)
    assert (
        "## PPO EMA beside PPO\n\n| | PPO | PPO EMA | difference |\n|:---|---:|---:|---:|\n" + rows
        in markdown
    )
    assert f"\n\n{sentence}\n\n## Largest gains by the gold judge" in markdown


def test_without_a_gold_score_the_report_does_not_mention_gold():
    evaluation = deepcopy(EVALUATION)
    evaluation["judge"] = "score"
    for metrics in evaluation["policies"].values():
        del metrics["gold_score"]
    del evaluation["win_rates"]["gold"]
    evaluation["samples"] = evaluation["samples"][1:]
    evaluation["largest_gains"] = evaluation["largest_losses"] = []
    assert "gold" not in render_markdown(evaluation, CAVEATS)
    assert "gold" not in printed(evaluation)


def test_a_function_judge_stands_beside_the_others_and_needs_no_caveat():
    evaluation = deepcopy(EVALUATION)
    evaluation["win_rates"]["words"] = evaluation["win_rates"]["gold"]
    evaluation["policies"]["sft"]["words_score"] = 2.0
    evaluation["policies"]["ppo"]["words_score"] = 3.5
    evaluation["samples"][0] |= {"sft_words": 4.0, "ppo_words": 2.0}
    markdown = render_markdown(evaluation, CAVEATS)
    assert "| gold score | 1.25 | 1.00 | -0.25 |\n| words score | 2.00 | 3.50 | +1.50 |" in markdown
    assert "**By the words judge, no difference is shown.** It prefers PPO's" in markdown
    assert markdown.count("180 wins, 20 ties, 200 losses.\n\n") == 1
    assert "(score -1.00, gold 1.00, words 4.00)" in markdown
    assert "The words judge prefers it on" in printed(evaluation)


@pytest.mark.parametrize(
    ("lower", "upper", "verdict"),
    [
        (0.501, 0.6, "PPO is better"),
        (0.5, 0.6, "no difference is shown"),
        (0.4, 0.5, "no difference is shown"),
        (0.4, 0.499, "PPO is worse"),
    ],
)
def test_the_verdict_needs_the_whole_interval(lower, upper, verdict):
    evaluation = deepcopy(EVALUATION)
    evaluation["win_rates"]["gold"] |= {"lower": lower, "upper": upper}
    assert f"**By the gold judge, {verdict}.**" in render_markdown(evaluation, CAVEATS)
