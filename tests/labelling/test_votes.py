"""The file of votes: training data, which no end of a server damages."""

import json
import os

import pytest

from rlhf_pipeline.config.split import ColumnMap, SourceConfig
from rlhf_pipeline.data.records import Example, Message, Unused
from rlhf_pipeline.data.sources.read_rows import read
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.labelling.votes import Vote, add_vote, locked, read_votes, remove_vote


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


def test_the_source_files_reads_votes_as_comparisons_and_skips_ties(votes):
    for number, scores in enumerate([(1, 0), (0, 1), (1, 1), (0, 0)]):
        add_vote(votes, vote(number, scores=scores))
    columns = ColumnMap(
        prompt="prompt", answers=("first", "second"), scores=("first_score", "second_score")
    )
    found = [
        row for _, row in read(SourceConfig(name="files", path=str(votes), columns=columns), 0)
    ]
    tie = Unused("the two answers have the same score", bad=False)
    assert found == [
        Example((Message("user", "Question 0?"),), "One 0.", "Two 0. \u2028 é"),
        Example((Message("user", "Question 1?"),), "Two 1. \u2028 é", "One 1."),
        tie,
        tie,
    ]


def test_a_line_has_what_one_wants_to_know_later(votes):
    add_vote(votes, vote(0))
    assert json.loads(votes.read_text()) == {
        "prompt": [{"role": "user", "content": "Question 0?"}],
        "first": "One 0.",
        "second": "Two 0. \u2028 é",
        "first_score": 1,
        "second_score": 0,
        "reason": "shorter",
        "annotator": "Ann",
        "pair": "pair 0",
        "policies": ["first", "second"],
        "shown_as_a": "second",
        "time": "2026-11-23T12:00:00+00:00",
    }
    assert read_votes(votes) == [vote(0).model_copy(update={"judges": {}})]


def test_a_vote_is_forced_to_disk_as_a_whole(votes, monkeypatch):
    on_disk = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: on_disk.append(votes.read_text()))
    add_vote(votes, vote(0))
    (text,) = on_disk
    assert text.endswith("\n") and json.loads(text)["pair"] == "pair 0"


def test_only_the_first_vote_of_a_person_on_a_pair_counts(votes):
    add_vote(votes, vote(0))
    add_vote(votes, vote(0, scores=(0, 1)))
    add_vote(votes, vote(0, "Bob", scores=(0, 1)))
    assert [(v.annotator, v.first_score) for v in read_votes(votes)] == [("Ann", 1), ("Bob", 0)]


def test_an_undone_vote_leaves_the_others_as_they_were(votes):
    for number in range(3):
        add_vote(votes, vote(number))
    lines = votes.read_bytes().splitlines()
    remove_vote(votes, "Bob", "pair 1")
    assert votes.read_bytes().splitlines() == lines
    remove_vote(votes, "Ann", "pair 1")
    assert votes.read_bytes().splitlines() == [lines[0], lines[2]]
    remove_vote(votes, "Ann", "pair 1")
    add_vote(votes, vote(1))
    assert votes.read_bytes().splitlines() == [lines[0], lines[2], lines[1]]
    assert {path.name for path in votes.parent.iterdir()} <= {"votes.jsonl", "votes.jsonl.lock"}


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_half_a_vote_left_by_a_kill_is_reported_and_removed(votes, caplog, kept):
    add_vote(votes, vote(0))
    whole = votes.read_bytes()
    add_vote(votes, vote(1))
    second = votes.read_bytes().removeprefix(whole)
    votes.write_bytes(whole + second[:kept])
    assert [v.pair for v in read_votes(votes)] == ["pair 0"]  # without the lock: nothing changes
    assert votes.read_bytes() == whole + second[:kept]
    add_vote(votes, vote(2))
    assert [v.pair for v in read_votes(votes)] == ["pair 0", "pair 2"]
    assert votes.read_bytes().startswith(whole + b"{")
    assert "votes.jsonl: removed half a vote" in caplog.text


def test_a_new_file_is_created_with_its_folder(tmp_path):
    file = tmp_path / "new" / "votes.jsonl"
    with locked(file):
        assert read_votes(file) == []


def test_a_file_with_other_lines_is_refused_and_not_changed(votes):
    add_vote(votes, vote(0))
    text = votes.read_text() + '{"prompt": "a pair"}\n'
    votes.write_text(text)
    with pytest.raises(DataError, match=r"votes\.jsonl:2: found no vote \(Field required\)\. Fix:"):
        add_vote(votes, vote(1))
    assert votes.read_text() == text
