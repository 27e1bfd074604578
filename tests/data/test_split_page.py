"""The page of the split and its summary in the terminal: the facts, once each."""

import io
import json
from copy import deepcopy
from itertools import pairwise

import pytest
from rich.console import Console

from rlhf_pipeline.data.split_page import histogram, print_summary, render_markdown


def tokens(*numbers):
    return dict(zip(("total", "max", "p50", "p90", "p99"), numbers, strict=True))


REPORT = {
    "sources": {
        "Anthropic/hh-rlhf": {
            "rows": 160_800,
            "bad": {"no answer": 12, "the text contains the control token <|end|>": 1_310},
            "skipped": {},
            "left_out_by_fraction": 0,
            "duplicates_merged": 0,
            "repeats_of_held_out": 37,
            "near_duplicates": 30,
            "without_reference": 0,
            "parts": {
                "sft": 30_963,
                "reward_model": 62_000,
                "ppo": 61_000,
                "validation": 3_100,
                "test": 2_378,
            },
        },
        "files (my_rows_.jsonl)": {
            "rows": 10_000,
            "bad": {},
            "skipped": {"the scores are equal": 800},
            "left_out_by_fraction": 4_600,
            "duplicates_merged": 12,
            "repeats_of_held_out": 0,
            "near_duplicates": 0,
            "without_reference": 0,
            "parts": {"sft": 4_000, "validation": 300, "test": 288},
        },
    },
    "distinct_prompts": {
        "test": 2_000,
        "validation": 3_000,
        "sft": 25_000,
        "reward_model": 35_000,
        "ppo": 35_000,
    },
    "conversations": {
        "test": 1_000,
        "validation": 2_000,
        "sft": 20_000,
        "reward_model": 13_500,
        "ppo": 13_500,
    },
    "without_reference": {},
    "files": {
        "sft/train.arrow": {
            "rows": 34_000,
            "duplicates_merged": 0,
            "dropped": {
                "chosen answer over max_response_tokens=192": 100,
                "prompt over max_prompt_tokens=512": 900,
            },
            "truncated": {"prompts cut": 40},
            "tokens": {
                "prompt_ids": tokens(5_000_000, 512, 121, 311, 491),
                "response_ids": tokens(2_000_000, 192, 51, 131, 181),
            },
        },
        "sft/validation.arrow": {
            "rows": 3_400,
            "duplicates_merged": 0,
            "dropped": {},
            "truncated": {},
            "tokens": {
                "prompt_ids": tokens(500_000, 510, 120, 310, 490),
                "response_ids": tokens(200_000, 190, 50, 130, 180),
            },
        },
        "evaluation/test.arrow": {
            "rows": 1_990,
            "duplicates_merged": 666,
            "dropped": {"prompt over max_prompt_tokens=512": 10},
            "truncated": {},
            "tokens": {"prompt_ids": tokens(300_000, 512, 100, 300, 500)},
        },
    },
    "overlap": {"test and validation": 0, "test and sft": 0, "validation and sft": 0},
    "lengths": {
        "prompt": {"limit": 512, "counts": {"17": 992, "600": 8}},
        "response": {"limit": 192, "counts": {"20": 3_000}},
    },
    "examples": {
        "SFT": [["User: <hi>\n", False], ["Hello.<|end|>", True]],
        "PPO, prompt": [["User: " + "a" * 3_000, False]],
    },
    "pretraining": {
        "sources": {
            "files (wiki.txt)": {"rows": 1_200, "bad": {"no text": 3}, "skipped": {"empty": 2}}
        },
        "documents": 1_195,
        "tokens": 1_234_567,
        "block_tokens": 256,
        "blocks": 4_822,
        "tokens_left_out": 135,
    },
    "settings": {
        "weights": [2, 4, 4],
        "validation_fraction": 0.02,
        "test_fraction": 0.04,
        "near_duplicates": "drop",
        "without_reference": "error",
        "over_long_prompts": "drop",
        "over_long_responses": "error",
        "sft_loss": "response",
    },
}

FACTS = [
    # rows, bad, skipped, beyond fraction, merged, near held-out, used
    "| Anthropic/hh-rlhf | 160,800 | 1,322 | 0 | 0 | 0 | 37 | 159,441 |",
    r"| files (my_rows\_.jsonl) | 10,000 | 0 | 800 | 4,600 | 12 | 0 | 4,588 |",
    "| all sources | 170,800 | 1,322 | 800 | 4,600 | 12 | 37 | 164,029 |",
    "30 rows are such near duplicates.",
    r"| Anthropic/hh-rlhf | 1,310 | bad | the text contains the control token \<\|end\|> |",
    r"| files (my_rows\_.jsonl) | 800 | skipped | the scores are equal |",
    # distinct prompts, conversations, their share, the requested one: 94% * 2 / 10
    "| sft | 25,000 | 20,000 | 40.0% | 18.8% |",
    "| test | 2,000 | 1,000 | 2.0% | 4.0% |",
    "The weights 2 : 4 : 4 divide",
    "all 3 pairs of parts were compared",
    "| all sources | 34,963 | 62,000 | 61,000 | 3,400 | 2,666 |",
    "| sft/train.arrow | 34,000 | 0 | 1,000 | 40 |",
    "SFT learns the tokens of the final response.",
    "| sft/train.arrow | 900 | dropped | prompt over max_prompt_tokens=512 |",
    "| sft/train.arrow | 40 | cut | prompts cut |",
    "| sft/train.arrow | response_ids | 2,000,000 | 51 | 131 | 181 | 192 |",
    "**Prompts**, max_prompt_tokens = 512: 8 of 1,000 are longer (0.8%), dropped.",
    f"| 17 to 32 | 992 | 99.2% | {24 * chr(0x2588)} |",
    f"| 513 to 600 | 8 | 0.8% | {chr(0x2592)} |",
    "**Responses**, max_response_tokens = 192: none of 3,000 is longer.",
    "User: &lt;hi&gt;\n<mark>Hello.&lt;|end|&gt;</mark></pre>",
    f">User: {1_994 * 'a'} ...</pre>",
    "| files (wiki.txt) | 1,200 | 3 | 2 |",
    "1,195 documents with 1,234,567 tokens fill 4,822 blocks of 256 tokens. The last 135 tokens",
]


def test_the_page_states_every_fact_in_whole_tables():
    page = render_markdown(REPORT)
    assert [fact for fact in FACTS if fact not in page] == []
    assert page == render_markdown(json.loads(json.dumps(REPORT)))
    lines = page.splitlines()
    for line, following in pairwise(lines):
        if line.startswith("|") and following.startswith("|"):
            assert line.replace("\\|", "").count("|") == following.replace("\\|", "").count("|")


def changed(**settings):
    report = deepcopy(REPORT)
    report["settings"] |= settings
    return report


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sft_loss": "assistant"}, "SFT learns the tokens of every assistant turn."),
        ({"sft_loss": "all"}, "SFT learns all tokens, including the prompt."),
        ({"over_long_prompts": "truncate"}, "8 of 1,000 are longer (0.8%), cut."),
        ({"near_duplicates": "keep"}, "duplicates, which are trained on (`split.near_dup"),
    ],
)
def test_the_page_follows_the_settings(settings, words):
    assert words in render_markdown(changed(**settings))


def test_the_page_omits_empty_sections():
    report = changed()
    report["pretraining"] = None
    del report["sources"]["files (my_rows_.jsonl)"]
    report["sources"]["Anthropic/hh-rlhf"]["bad"] = {}
    report["files"] = {"sft/validation.arrow": REPORT["files"]["sft/validation.arrow"]}
    report["lengths"]["response"]["counts"] = {}
    page = render_markdown(report)
    assert not [words for words in ("language-model", "all sources", "reason") if words in page]
    assert "none of 0 is longer" in page


def test_prompts_without_a_true_answer_are_counted_where_others_have_one():
    report = changed()
    report["sources"]["files (my_rows_.jsonl)"]["without_reference"] = 500
    report["without_reference"] = {
        "ppo/train.arrow": {"files (my_rows_.jsonl)": 400},
        "evaluation/test.arrow": {"Anthropic/hh-rlhf": 3, "files (my_rows_.jsonl)": 20},
    }
    assert (
        "\n\n500 rows have prompts without a true answer. In ppo/train.arrow: files "
        "(my_rows\\_.jsonl) 400. In evaluation/test.arrow: Anthropic/hh-rlhf 3, files "
        "(my_rows\\_.jsonl) 20.\n\n"
    ) in render_markdown(report)
    report["settings"]["without_reference"] = "drop"
    report["without_reference"] = {}
    kept_out = "without a true answer, which are kept out of PPO and the final evaluation.\n\n"
    assert kept_out in render_markdown(report)


def test_the_terminal():
    console = Console(file=io.StringIO(), width=80)
    print_summary(changed(near_duplicates="keep"), console)
    words = console.file.getvalue().split()
    for fact in (
        "170,800 rows read, 1,322 bad, 800 skipped, 4,600 beyond fractions, 12 merged, 37 near",
        "sft 34,000 3,400 0 1,000 40",
        "evaluation 1,990 0 666 10 0",
        "WARNING: training includes 30 near duplicates of held-out prompts",
    ):
        assert fact in " ".join(words)


def bars(counts, limit):
    return [(label, count) for label, count, _, _ in histogram(counts, limit)]


@pytest.mark.parametrize(
    ("counts", "limit", "expected"),
    [
        # 99% of the lengths is 10, so bars have a width of 1; the tail is one bar.
        ({10: 99, 10_000: 1}, 12, [("10 to 10", 99), ("11 to 11", 0), ("12 to 12", 0),
                                   ("13 to 10,000", 1)]),
        # A distant limit counts only if it is exceeded: 400 / 16 = 25.
        ({40: 100}, 400, [("40 to 40", 100)]),
        ({40: 99, 10_000: 1}, 400, [("40 to 50", 99), *((f"{n + 1} to {n + 25}", 0)
                                   for n in range(50, 400, 25)), ("401 to 10,000", 1)]),
        # No bar has lengths on both sides of the limit: 198 / 16 is a little over 12.
        (dict.fromkeys(range(1, 201), 1), 102, [
            ("1 to 11", 11), *((f"{n + 1} to {n + 13}", 13) for n in range(11, 193, 13)),
            ("194 to 206", 7)]),
        ({}, 100, []),
    ],
)  # fmt: skip
def test_the_ranges_of_a_histogram(counts, limit, expected):
    assert bars(counts, limit) == expected


def test_bars_are_as_long_as_their_numbers_and_shaded_above_the_limit():
    found = [row[2:] for row in histogram({1: 6, 2: 12, 3: 1}, 2)]
    full, shade = chr(0x2588), chr(0x2592)
    assert found == [(6 / 19, 12 * full), (12 / 19, 24 * full), (1 / 19, 2 * shade)]
