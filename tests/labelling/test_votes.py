"""The pairs that people compare, and the file of votes, which no end of a server damages."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from made_by_hand import sealed
from random_answers import policy

from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.data.files import read_rows
from rlhf_pipeline.data.records import Example, Message, Unused
from rlhf_pipeline.data.sources.registry import read
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.labelling.votes import (
    Vote,
    add_vote,
    distinct_pairs,
    evaluation_rows,
    locked,
    read_votes,
    remove_vote,
)
from rlhf_pipeline.verdict.answers import write_answers


def vote(number, annotator="Ann", scores=(1, 0)):
    return Vote(
        pair=f"pair {number}",
        prompt=[Message("user", f"Question {number}?")],
        first=f"One {number}.",
        second=f"Two {number}. \u2028 é",
        first_score=scores[0],
        second_score=scores[1],
        reason="shorter",
        annotator=annotator,
        shown_as_a="second",
        time="2026-11-23T12:00:00+00:00",
        judges={"gold": 1.0},
    )


def test_the_source_files_reads_votes_and_a_tie_only_with_its_label(votes):
    for number, scores in enumerate([(0, 1), (1, 0), (1, 1), (0, 0)]):
        add_vote(votes, vote(number, scores=scores))
    columns = {"prompt": "prompt", "answers": ("first", "second")}
    columns["scores"] = ("first_score", "second_score")

    def rows(**label):
        source = SourceConfig(name="files", path=str(votes), columns=columns | label)
        return [row for _, row in read(source, 0)]

    first, *_, tie = rows()
    assert first == Example((Message("user", "Question 0?"),), "Two 0. \u2028 é", "One 0.")
    assert tie == Unused("the two answers have the same score", bad=False)
    labelled = [("Two", None), ("One", None), ("One", True), ("One", False)]
    assert [(each.chosen[:3], each.label) for each in rows(label="label")] == labelled


def test_a_vote_is_forced_to_disk_as_a_whole(votes, monkeypatch):
    on_disk = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: on_disk.append(votes.read_text()))
    add_vote(votes, vote(0))
    assert on_disk[0] == ""  # the new file is forced to the disk before it gets the name
    assert on_disk[-1].endswith("\n") and json.loads(on_disk[-1])["pair"] == "pair 0"


def test_only_the_first_vote_of_a_person_on_a_pair_counts(votes):
    add_vote(votes, vote(0))
    add_vote(votes, vote(0, scores=(0, 1)))
    add_vote(votes, vote(0, "Bob", scores=(0, 1)))
    assert [(v.annotator, v.first_score) for v in read_votes(votes)] == [("Ann", 1), ("Bob", 0)]


def test_an_undone_vote_leaves_the_others_mode_and_owner_as_they_were(votes):
    for number in range(3):
        add_vote(votes, vote(number))
    lines = votes.read_bytes().splitlines()
    votes.chmod(0o660)
    if os.geteuid() == 0:
        os.chown(votes, 1000, 1000)
    remove_vote(votes, "Bob", "pair 1")
    assert votes.read_bytes().splitlines() == lines
    before = votes.stat()
    remove_vote(votes, "Ann", "pair 1")
    assert votes.read_bytes().splitlines() == [lines[0], lines[2]]
    after = votes.stat()
    assert after.st_ino != before.st_ino
    assert after.st_mode & 0o777 == 0o660
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)
    remove_vote(votes, "Ann", "pair 1")
    add_vote(votes, vote(1))
    assert votes.read_bytes().splitlines() == [lines[0], lines[2], lines[1]]
    assert {path.name for path in votes.parent.iterdir()} <= {"votes.jsonl", "votes.jsonl.lock"}


@pytest.mark.parametrize(
    "content", ["remember the milk, and tea", '[{"prompt": "a", "first": "b"}]', "{}\n{"]
)
def test_a_file_of_something_else_is_refused_before_a_byte_changes(votes, content):
    votes.write_text(content)
    with pytest.raises(DataError, match=r"votes\.jsonl:1: found no vote"), locked(votes):
        pass
    with pytest.raises(DataError, match="found no vote"):
        add_vote(votes, vote(0))
    assert votes.read_text() == content
    assert {path.name for path in votes.parent.iterdir()} == {"votes.jsonl", "votes.jsonl.lock"}


DIALOGUE = [
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hi.\n\nUser: this is a quotation"},
    {"role": "user", "content": "Bye."},
]


def test_an_evaluation_gives_the_answers_of_the_first_two_policies(tmp_path):
    answers = {}
    for name, score in (("sft", 1.0), ("ppo", 1.5), ("ppo_ema", 2.0)):
        answers[name] = [
            replace(answer, draw=draw, messages=DIALOGUE, response=response)
            for answer in policy(np.random.default_rng(0), 0.0)[:2]
            for draw, response in enumerate((f"{name} {answer.row}", "again"))
        ]
        answers[name][0].scores.update({"score": score, "gold": None})
    write_answers(answers, tmp_path)
    (pair, other), left_out = distinct_pairs(evaluation_rows(sealed(tmp_path)))
    assert (pair.first, pair.second, pair.policies) == ("sft 0", "ppo 0", ("sft", "ppo"))
    assert pair.prompt[1] == Message("assistant", "Hi.\n\nUser: this is a quotation")
    assert len(pair.prompt) == 3
    assert pair.judges == {"score": 0.5, "gold": 0.0}
    assert pair.pair != other.pair and not left_out


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
