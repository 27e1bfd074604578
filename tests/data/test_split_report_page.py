"""The page of the split and its summary in the terminal: the facts, once each."""

import io
import json
from copy import deepcopy
from itertools import pairwise

import pytest
from rich.console import Console

from rlhf_pipeline.data.split_report import print_summary, render_markdown


def source(rows, bad=(), skipped=(), parts=(), **counts):
    names = ("left_out_by_fraction", "duplicates_merged", "repeats_of_held_out", "near_duplicates",
             "without_reference")  # fmt: skip
    found = {"rows": rows, "bad": dict(bad), "skipped": dict(skipped), "parts": dict(parts)}
    return dict.fromkeys(names, 0) | found | counts


def file(rows, merged=0, dropped=(), cut=(), **tokens):
    """A file; `tokens` are total, median, 90%, 99% and maximum of each column."""
    names = ("total", "p50", "p90", "p99", "max")
    found = {f"{name}_ids": dict(zip(names, each, strict=True)) for name, each in tokens.items()}
    return {
        "rows": rows, "duplicates_merged": merged, "dropped": dict(dropped), "truncated": dict(cut),
        "tokens": found,
    }  # fmt: skip


HH, MINE, LONG = "Anthropic/hh-rlhf", "files (my_rows_.jsonl)", "prompt over max_prompt_tokens=512"
CONTROL = "the text contains the control token <|end|>"
PARTS = ("test", "validation", "sft", "reward_model", "ppo")
REPORT = {
    "sources": {
        HH: source(160_800, {"no answer": 12, CONTROL: 1_310}, repeats_of_held_out=37,
                   near_duplicates=30,
                   parts=zip(PARTS, (2_378, 3_100, 30_963, 62_000, 61_000), strict=True)),
        MINE: source(10_000, skipped={"the scores are equal": 800}, left_out_by_fraction=4_600,
                     duplicates_merged=12, parts={"sft": 4_000, "validation": 300, "test": 288}),
    },
    "distinct_prompts": dict(zip(PARTS, (2_000, 3_000, 25_000, 35_000, 35_000), strict=True)),
    "conversations": dict(zip(PARTS, (1_000, 2_000, 20_000, 13_500, 13_500), strict=True)),
    "serves": [["sft", "reward_model", "ppo"], ["sft"]],
    "unserved": [],
    "without_reference": {},
    "files": {
        "sft/train.arrow": file(
            34_000, 0, {"chosen answer over max_response_tokens=192": 100, LONG: 900},
            {"prompts cut": 40}, prompt=(5_000_000, 121, 311, 491, 512),
            response=(2_000_000, 51, 131, 181, 192)),
        "sft/validation.arrow": file(3_400, prompt=(500_000, 120, 310, 490, 510)),
        "evaluation/test.arrow": file(1_990, 666, {LONG: 10}, prompt=(300_000, 100, 300, 500, 512)),
    },
    "overlap": {"test and validation": 0, "test and sft": 0, "validation and sft": 0},
    "lengths": {
        "prompt": {"limit": 512, "texts": 1_000, "longer": 8, "total": 21_664, "max": 600,
                   "p50": 17, "p90": 18, "p99": 19},
        "response": {"limit": 192, "texts": 0, "longer": 0},
    },
    "examples": {
        "SFT": [["User: <hi>\n", False], ["Hello.<|end|>", True]],
        "PPO, prompt": [["User: " + "a" * 3_000, False]],
    },
    "pretraining": {
        "sources": {"files (wiki.txt)": source(1_200, {"no text": 3}, {"empty": 2})},
        "documents": 1_195, "tokens": 1_234_567, "block_tokens": 256, "blocks": 4_822,
        "tokens_left_out": 135,
    },
    "settings": {
        "weights": [2, 4, 4], "validation_fraction": 0.02, "test_fraction": 0,
        "near_duplicates": "drop", "without_reference": "error", "over_long_prompts": "drop",
        "over_long_responses": "error", "sft_loss": "response",
    },
}  # fmt: skip

FACTS = [
    # rows, bad, skipped, beyond fraction, merged, near held-out, used
    "| Anthropic/hh-rlhf | 160,800 | 1,322 | 0 | 0 | 0 | 37 | 159,441 |",
    r"| files (my_rows\_.jsonl) | 10,000 | 0 | 800 | 4,600 | 12 | 0 | 4,588 |",
    "30 rows are such near duplicates.",
    r"| Anthropic/hh-rlhf | 1,310 | bad | the text contains the control token \<\|end\|> |",
    r"| files (my_rows\_.jsonl) | 800 | skipped | the scores are equal |",
    # distinct prompts, conversations, their share
    "| sft | 25,000 | 20,000 | 40.0% |",
    "| test | 2,000 | 1,000 | 2.0% |",
    "The weights 2 : 4 : 4 divide all conversations outside validation (2.0%) and test (0.0%).",
    r"| files (my_rows\_.jsonl) | 4,000 | 0 | 0 | 300 | 288 |",
    "all 3 pairs of parts were compared",
    "| sft/train.arrow | 34,000 | 0 | 1,000 | 40 |",
    "SFT learns the tokens of the final response.",
    "| sft/train.arrow | 900 | dropped | prompt over max_prompt_tokens=512 |",
    "| sft/train.arrow | 40 | cut | prompts cut |",
    "| sft/train.arrow | response_ids | 2,000,000 | 51 | 131 | 181 | 192 |",
    "| prompts | 1,000 | 17 | 18 | 19 | 600 | 512 | 8 (0.8%) |",
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
    page = render_markdown(report)
    assert not [words for words in ("language-model", "reason", "| responses") if words in page]


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


def test_a_phase_that_no_row_can_serve_is_named():
    console = Console(file=io.StringIO(), width=80)
    report = changed() | {"unserved": ["reward_model", "ppo"]}
    print_summary(report, console)
    assert "\nNo row can serve reward_model or ppo: weight 0\n" in console.file.getvalue()
    assert ". No row can serve reward_model or ppo, which so have weight 0.\n\nA conv" in (
        render_markdown(report)
    )


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
