"""True answers: one for each prompt, whatever the order of the sources; none is missing unseen."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.rewards import Rewards
from rlhf_pipeline.data.records import Example, Message
from rlhf_pipeline.data.split_report import require_true_answers
from rlhf_pipeline.errors import DataError


def asked(prompt: str, *answers: str, reference: str | None = None) -> Example:
    return Example((Message("user", prompt),), *answers, reference=reference)


SUMS = range(10)
PAIRS = [asked(f"What is {n} + {n}?", f"It is {2 * n}.", "I do not know.") for n in SUMS]
BARE = [asked(f"What is {n} + {n}?") for n in SUMS]
ANSWERED = [asked(f"what is {n} + {n}? ", reference=str(2 * n)) for n in SUMS]
SAME_PAIRS = [
    asked(f"What is {n} + {n}?", f"It is {2 * n}.", "I do not know.", reference=str(2 * n))
    for n in SUMS
]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_a_merge_keeps_the_true_answer(order, write_records, prepare, load) -> None:
    sources = [PAIRS, BARE, ANSWERED, SAME_PAIRS]
    folders = [write_records(f"source{index}", *sources[index]) for index in order]
    report = prepare(*folders)
    rows = [row for file in ("ppo/train", "ppo/validation", "evaluation/test")
            for row in load(f"{file}.arrow")]  # fmt: skip
    assert report["without_reference"] == {}
    assert [row["reference"] for row in rows] == [
        str(2 * int(re.findall(r"\d+", row["messages"][0]["content"])[0])) for row in rows
    ]
    assert len(rows) == 3 + 1 + 1


def test_two_true_answers_of_a_prompt_are_refused(write_records, prepare) -> None:
    first = write_records("first", *ANSWERED, asked("What is 3 + 3?", reference="6"))
    wrong = [asked(f"What is {n} + {n}?", reference=f"{n}{n}") for n in (3, 4)]
    with pytest.raises(
        DataError,
        match=r"^split: found 2 prompts with different true answers, expected one each\. For "
        r"example, 'What is 3 \+ 3\?' has '33' \(second:0\) and '6'\. Fix: correct the answers, or "
        r"remove columns\.reference of one source$",
    ):
        prepare(first, write_records("second", *wrong))


def test_prompts_without_a_true_answer_can_leave_ppo_and_the_evaluation(
    write_records, prepare, load
) -> None:
    other = [asked(f"Why {n}?", "Because.", "No idea.") for n in range(10)]
    demonstrations = [asked(f"How {n}?", "So.") for n in range(10)]
    folders = [
        write_records("other", *other),
        write_records("demonstrations", *demonstrations),
        write_records("answered", *ANSWERED),
    ]
    report = prepare(*folders, without_reference="drop")
    assert report["without_reference"] == {}
    # Ten sums: one each for test and validation, eight for PPO, which alone can use them.
    files = {name: load(f"{name}.arrow") for name in ("ppo/train", "ppo/validation",
                                                      "evaluation/test")}  # fmt: skip
    assert [len(rows) for rows in files.values()] == [8, 1, 1]
    assert all(row["reference"] for rows in files.values() for row in rows)
    # Of the other 20 conversations, two each are held out. 2 : 4 of the 8 comparisons that remain
    # are 2.7 and 5.3.
    assert len(load("sft/train.arrow")) == 8 + 3
    assert len(load("reward_model/train.arrow")) == 5
    counts = [source["without_reference"] for source in report["sources"].values()]
    assert counts == [10, 10, 0]
    # The two of the test leave all files.
    skipped = [source["skipped"] for source in report["sources"].values()]
    reason = "its prompt has no true answer (split.without_reference is drop)"
    assert sum(reasons.get(reason, 0) for reasons in skipped) == 2
    assert {name for reasons in skipped for name, count in reasons.items() if count} == {reason}


# --- a run that reads true answers ----------------------------------------------------------------

REPORT = {
    "without_reference": {
        "ppo/train.arrow": {"files (pairs.jsonl)": 144, "files (more.jsonl)": 3},
        "evaluation/test.arrow": {"files (pairs.jsonl)": 20},
    }
}
CODE = """
def correct(prompts, responses, references):
    return [float(response == reference) for response, reference in zip(responses, references)]


def brief(prompts, responses):
    return [-len(response) for response in responses]
"""


@pytest.fixture
def split(tmp_path: Path) -> Path:
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


def test_a_reward_that_reads_true_answers_needs_them_in_ppo(split: Path) -> None:
    given = ["trained", f"{split}/mine.py:brief", f"{split}/mine.py:correct"]
    rewards = TypeAdapter(Rewards).validate_python(given)
    with pytest.raises(
        DataError,
        match=r"^split: found prompts without a true answer in ppo/train\.arrow \(files "
        r"\(pairs\.jsonl\) 144, files \(more\.jsonl\) 3\), expected one for each, as correct reads "
        r"it\. Fix: set split\.without_reference to drop, which keeps such prompts out of PPO and "
        r"the final evaluation, or set columns\.reference of the source$",
    ):
        require_true_answers(split, rewards, ())
    require_true_answers(split, rewards[:2], ())


@pytest.mark.parametrize("judge", [{"reference": "exact"}, "{split}/mine.py:correct"])
def test_a_judge_that_reads_true_answers_needs_them_in_the_test(split: Path, judge) -> None:
    given = judge.format(split=split) if isinstance(judge, str) else judge
    evaluate = EvaluateConfig(judges=[given])
    with pytest.raises(DataError, match=r"in evaluation/test\.arrow \(files \(pairs\.jsonl\) 20\)"):
        require_true_answers(split, (), evaluate.judges)
    require_true_answers(split, (), EvaluateConfig(judges=[f"{split}/mine.py:brief"]).judges)


def test_the_reward_of_the_page_rewards_right_answers_alone() -> None:
    page = (Path(__file__).parents[2] / "docs/ppo.md").read_text()
    (function,) = re.findall(r"```python\n(.*?)```", page[page.index("## Rewards") :], re.DOTALL)
    defined: dict[str, Any] = {}
    exec(function, defined)
    asked = [[{"role": "user", "content": "17 + 25?"}]] * 2
    answers = ["17 + 25 = 42.", "17 + 25 = 43."]
    assert defined["exact_match"](asked, answers, ["42", "42"]) == [1.0, 0.0]
