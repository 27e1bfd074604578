"""The pairs that people compare."""

import json
from dataclasses import replace

import numpy as np
import pytest
from random_answers import policy

from rlhf_pipeline.data.formats import read_rows
from rlhf_pipeline.data.records import Message
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.evaluation.comparison import write_answers
from rlhf_pipeline.labelling.pairs import distinct_pairs, evaluation_rows

DIALOGUE = [
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hi.\n\nUser: this is a quotation"},
    {"role": "user", "content": "Bye."},
]


def test_an_evaluation_gives_the_answers_of_the_first_two_policies(tmp_path):
    answers = {
        name: [
            replace(answer, response=f"{name} {answer.row}", messages=DIALOGUE)
            for answer in policy(np.random.default_rng(0), 0.0)[:2]
        ]
        for name in ("sft", "ppo", "ppo_ema")
    }
    answers["sft"][0].scores.update({"score": 1.0, "gold": None})
    answers["ppo"][0].scores.update({"score": 1.5, "gold": 2.0})
    write_answers(answers, tmp_path)
    (pair, other), left_out = distinct_pairs(evaluation_rows(tmp_path))
    assert (pair.first, pair.second, pair.policies) == ("sft 0", "ppo 0", ("sft", "ppo"))
    assert pair.prompt[1] == Message("assistant", "Hi.\n\nUser: this is a quotation")
    assert len(pair.prompt) == 3
    assert pair.judges == {"score": 0.5, "gold": 0.0}
    assert pair.pair != other.pair and not left_out


def test_people_compare_one_pair_of_answers_to_each_prompt(tmp_path):
    answers = {
        name: [
            replace(a, response=f"{name} {a.row} {draw}", messages=DIALOGUE[2:], draw=draw)
            for a in policy(np.random.default_rng(0), 0.0)[:2]
            for draw in range(3)
        ]
        for name in ("sft", "ppo")
    }
    write_answers(answers, tmp_path)
    found, _ = distinct_pairs(evaluation_rows(tmp_path))
    assert [(pair.first, pair.second) for pair in found] == [
        ("sft 0 0", "ppo 0 0"),
        ("sft 1 0", "ppo 1 0"),
    ]


def test_an_evaluation_of_an_earlier_version_is_refused(tmp_path):
    """Its prompts are texts, whose turns nobody can tell from quotations."""
    answers = policy(np.random.default_rng(0), 0.0)[:2]
    others = [replace(answer, response=f"{answer.response} more") for answer in answers]
    write_answers({"sft": answers, "ppo": others}, tmp_path)
    with pytest.raises(DataError, match=r"\(2, column 'prompt' is NoneType.*repeat its"):
        distinct_pairs(evaluation_rows(tmp_path))


def test_what_split_could_not_use_is_left_out_and_counted(tmp_path):
    rows = [
        {"prompt": "One?", "first": "a", "second": "b"},
        {"prompt": "ONE? ", "first": "a", "second": "b"},
        {"prompt": "Two?", "first": "a", "second": " a"},
        {"prompt": "Three?", "first": "a", "second": ""},
        {"prompt": "Four?", "first": "\0", "second": "b"},
        {"prompt": "Five?", "second": "b"},
        {"prompt": DIALOGUE, "first": "a", "second": "b", "policies": ["old", "new"]},
        {"prompt": "Six?", "first": "a", "second": "b", "policies": "old"},
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "not JSON\n")
    pairs, left_out = distinct_pairs(row for _, row in read_rows(str(file), (), "train"))
    assert [pair.policies for pair in pairs] == [("first", "second"), ("old", "new")]
    assert [len(pair.prompt) for pair in pairs] == [1, 3]
    assert left_out == {
        "it repeats an earlier pair": 1,
        "column 'policies' is not what a pair has": 1,
        "the two answers are equal": 1,
        "the second answer is empty": 1,
        "a NUL character in the text": 1,
        "column 'first' is missing; the columns are 'prompt', 'second'": 1,
        "not JSON (Expecting value)": 1,
    }
