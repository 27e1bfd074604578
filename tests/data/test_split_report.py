"""The report of the split: the exact page, the exact terminal output, the file of the figure."""

import io
import json
import subprocess
import sys
from copy import deepcopy

import pytest
from rich.console import Console

from rlhf_pipeline.data.split_report import plot_lengths, print_summary, render_markdown


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
            "files (wiki.txt)": {
                "rows": 1_200,
                "bad": {"no text": 3},
                "skipped": {"empty": 2},
            }
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

MARKDOWN = r"""# Prepared data

## Rows of each source

| source | rows | bad | skipped | beyond fraction | merged | near held-out | used |
|:---|---:|---:|---:|---:|---:|---:|---:|
| Anthropic/hh-rlhf | 160,800 | 1,322 | 0 | 0 | 0 | 37 | 159,441 |
| files (my_rows\_.jsonl) | 10,000 | 0 | 800 | 4,600 | 12 | 0 | 4,588 |
| all sources | 170,800 | 1,322 | 800 | 4,600 | 12 | 37 | 164,029 |

Merged rows repeat a row of an earlier source: same prompt, same answers. Rows near held-out ones have a conversation of a test source, or a first user turn that nearly repeats a held-out one: the Jaccard similarity of their 5-grams of words is at least 0.8. 30 rows are such near duplicates.

| source | rows |  | reason |
|:---|---:|:---|:---|
| Anthropic/hh-rlhf | 1,310 | bad | the text contains the control token \<\|end\|> |
| Anthropic/hh-rlhf | 12 | bad | no answer |
| files (my_rows\_.jsonl) | 800 | skipped | the scores are equal |

## Prompts of each part

| part | distinct prompts | conversations | share | requested |
|:---|---:|---:|---:|---:|
| sft | 25,000 | 20,000 | 40.0% | 18.8% |
| reward_model | 35,000 | 13,500 | 27.0% | 37.6% |
| ppo | 35,000 | 13,500 | 27.0% | 37.6% |
| validation | 3,000 | 2,000 | 4.0% | 2.0% |
| test | 2,000 | 1,000 | 2.0% | 4.0% |

The weights 2 : 4 : 4 divide all conversations outside validation and test. Shares differ from the requested ones if some conversations cannot serve every phase, or rows near held-out ones were left out.

A conversation is the system message and the first user turn. None is in two parts: all 3 pairs of parts were compared.

Rows of each source and part:

| source | sft | reward_model | ppo | validation | test |
|:---|---:|---:|---:|---:|---:|
| Anthropic/hh-rlhf | 30,963 | 62,000 | 61,000 | 3,100 | 2,378 |
| files (my_rows\_.jsonl) | 4,000 | 0 | 0 | 300 | 288 |
| all sources | 34,963 | 62,000 | 61,000 | 3,400 | 2,666 |

## Files of each phase

| file | rows | merged | dropped | cut |
|:---|---:|---:|---:|---:|
| sft/train.arrow | 34,000 | 0 | 1,000 | 40 |
| sft/validation.arrow | 3,400 | 0 | 0 | 0 |
| evaluation/test.arrow | 1,990 | 666 | 10 | 0 |

The files of PPO and evaluation contain each prompt once; further rows of the prompt are merged. SFT learns the tokens of the final response.

| file | rows |  | reason |
|:---|---:|:---|:---|
| sft/train.arrow | 900 | dropped | prompt over max_prompt_tokens=512 |
| sft/train.arrow | 100 | dropped | chosen answer over max_response_tokens=192 |
| sft/train.arrow | 40 | cut | prompts cut |
| evaluation/test.arrow | 10 | dropped | prompt over max_prompt_tokens=512 |

| file | column | tokens | median | 90% | 99% | longest |
|:---|:---|---:|---:|---:|---:|---:|
| sft/train.arrow | prompt_ids | 5,000,000 | 121 | 311 | 491 | 512 |
| sft/train.arrow | response_ids | 2,000,000 | 51 | 131 | 181 | 192 |
| sft/validation.arrow | prompt_ids | 500,000 | 120 | 310 | 490 | 510 |
| sft/validation.arrow | response_ids | 200,000 | 50 | 130 | 180 | 190 |
| evaluation/test.arrow | prompt_ids | 300,000 | 100 | 300 | 500 | 512 |

## Lengths

![Lengths of prompts and responses in tokens](lengths.png)

- prompts longer than max_prompt_tokens = 512: 8 of 1,000 (0.8%), dropped
- responses longer than max_response_tokens = 192: none of 3,000

## Examples

The first row of each phase, as the model sees it. It learns the marked tokens.

**SFT**

<pre style='white-space: pre-wrap'>User: &lt;hi&gt;
<mark>Hello.&lt;|end|&gt;</mark></pre>

**PPO, prompt**

<pre style='white-space: pre-wrap'>User: LONG ...</pre>

## Text for PPO's language-model loss

| source | rows | bad | skipped |
|:---|---:|---:|---:|
| files (wiki.txt) | 1,200 | 3 | 2 |

| source | rows |  | reason |
|:---|---:|:---|:---|
| files (wiki.txt) | 3 | bad | no text |
| files (wiki.txt) | 2 | skipped | empty |

1,195 documents with 1,234,567 tokens fill 4,822 blocks of 256 tokens. The last 135 tokens do not fill a block and are left out.
""".replace("LONG", "a" * 1_994)  # noqa: E501

TERMINAL = """\
Prepared data: 170,800 rows read, 1,322 bad, 800 skipped, 4,600
beyond fractions, 12 merged, 37 near held-out prompts

                rows   validation rows   merged   dropped   cut
 ──────────────────────────────────────────────────────────────
 sft          34,000             3,400        0     1,000    40
 evaluation    1,990                 0      666        10     0
"""


def test_the_markdown():
    assert render_markdown(REPORT) == MARKDOWN


def test_a_report_read_back_from_its_file_is_the_same_page():
    assert render_markdown(json.loads(json.dumps(REPORT))) == MARKDOWN


def test_the_page_omits_empty_sections():
    report = deepcopy(REPORT)
    report["pretraining"] = None
    del report["sources"]["files (my_rows_.jsonl)"]
    report["sources"]["Anthropic/hh-rlhf"]["bad"] = {}
    report["files"] = {"sft/validation.arrow": REPORT["files"]["sft/validation.arrow"]}
    page = render_markdown(report)
    assert "language-model" not in page
    assert "all sources" not in page
    assert "reason" not in page


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("assistant", "SFT learns the tokens of every assistant turn."),
        ("all", "SFT learns all tokens, including the prompt."),
    ],
)
def test_the_page_states_what_sft_learns(loss, words):
    report = deepcopy(REPORT)
    report["settings"]["sft_loss"] = loss
    assert words in render_markdown(report)


def test_cut_texts_are_not_reported_as_dropped():
    report = deepcopy(REPORT)
    report["settings"]["over_long_prompts"] = "truncate"
    assert (
        "- prompts longer than max_prompt_tokens = 512: 8 of 1,000 (0.8%), cut"
        in render_markdown(report)
    )


def test_near_duplicates_that_stay_are_named_on_the_page_and_in_the_terminal():
    report = deepcopy(REPORT)
    report["settings"]["near_duplicates"] = "keep"
    page = render_markdown(report)
    assert "30 rows are such near duplicates, which are trained on (`split.near_dup" in page
    console = Console(file=io.StringIO(), width=200)
    print_summary(report, console)
    warning = "WARNING: training includes 30 near duplicates of held-out prompts\n"
    assert console.file.getvalue().endswith(warning)


def test_prompts_without_a_true_answer_are_counted_where_others_have_one():
    report = deepcopy(REPORT)
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
    assert (
        "\n\n500 rows have prompts without a true answer, which are kept out of PPO and the final "
        "evaluation.\n\n"
    ) in render_markdown(report)


def test_the_terminal():
    console = Console(file=io.StringIO(), width=80)
    print_summary(REPORT, console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert "\n".join(lines).rstrip() + "\n" == TERMINAL


def test_the_same_report_is_the_same_file(tmp_path):
    plot_lengths(REPORT, tmp_path / "one.png")
    plot_lengths(json.loads(json.dumps(REPORT)), tmp_path / "two.png")
    other = deepcopy(REPORT)
    other["lengths"]["response"]["counts"]["21"] = 1
    plot_lengths(other, tmp_path / "other.png")
    one, two, changed = (
        (tmp_path / name).read_bytes() for name in ("one.png", "two.png", "other.png")
    )
    assert one.startswith(b"\x89PNG")
    assert one == two != changed
    assert b"tEXt" not in one  # no date, no version


def test_importing_the_report_imports_no_matplotlib():
    code = "import sys, rlhf_pipeline.data.split_report; print('matplotlib' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
