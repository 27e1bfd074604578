"""The file of votes: training data, which no end of a server damages."""

import json
import os

import pytest

from rlhf_pipeline.config.split import ColumnMap, SourceConfig
from rlhf_pipeline.data.records import Example, Message, Unused
from rlhf_pipeline.data.source import read
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


def test_with_its_label_a_tie_is_two_good_or_two_bad_answers(votes):
    for number, scores in enumerate([(0, 1), (1, 1), (0, 0)]):
        add_vote(votes, vote(number, scores=scores))
    columns = ColumnMap(
        prompt="prompt", answers=("first", "second"), scores=("first_score", "second_score"),
        label="label",
    )  # fmt: skip
    source = SourceConfig(name="files", path=str(votes), columns=columns)
    found = [row for _, row in read(source, 0)]
    assert [(example.chosen[:3], example.label) for example in found] == [
        ("Two", None), ("One", True), ("One", False),
    ]  # fmt: skip


def test_a_line_has_what_one_wants_to_know_later(votes):
    add_vote(votes, vote(0))
    fields = {"policies", "reason", "annotator", "shown_as_a", "time"}
    assert fields < json.loads(votes.read_text()).keys()
    assert read_votes(votes) == [vote(0).model_copy(update={"judges": {}})]


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


def test_a_file_with_other_lines_is_refused_and_not_changed(votes):
    add_vote(votes, vote(0))
    text = votes.read_text() + '{"prompt": "a pair"}\n'
    votes.write_text(text)
    with pytest.raises(DataError, match=r"votes\.jsonl:2: found no vote \(Field required\)\. Fix:"):
        add_vote(votes, vote(1))
    assert votes.read_text() == text


def test_a_complete_last_vote_without_its_end_is_kept(votes):
    """As an editor, or lines that were joined, leave it."""
    for number in range(2):
        add_vote(votes, vote(number))
    whole = votes.read_bytes()
    for content in (whole[:-1], whole.splitlines()[0]):
        votes.write_bytes(content)
        add_vote(votes, vote(2))
        assert votes.read_bytes().startswith(content + b"\n{")


@pytest.mark.parametrize(
    "content",
    ["remember the milk, and tea", '[{"prompt": "a", "first": "b"}]', "{}\n{", "notes\n\nmore"],
)
def test_a_file_of_something_else_is_refused_before_a_byte_changes(votes, content):
    votes.write_text(content)
    with pytest.raises(DataError, match=r"votes\.jsonl:1: found no vote"), locked(votes):
        pass
    with pytest.raises(DataError, match="found no vote"):
        add_vote(votes, vote(0))
    assert votes.read_text() == content
    assert {path.name for path in votes.parent.iterdir()} == {"votes.jsonl", "votes.jsonl.lock"}


def test_an_undone_vote_leaves_mode_and_owner_as_they_were(votes):
    add_vote(votes, vote(0))
    votes.chmod(0o660)
    if os.geteuid() == 0:
        os.chown(votes, 1000, 1000)
    before = votes.stat()
    remove_vote(votes, "Ann", "pair 0")
    after = votes.stat()
    assert after.st_ino != before.st_ino
    assert after.st_mode & 0o777 == 0o660
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)


def test_a_vote_that_does_not_fit_leaves_nothing(disk):
    file = disk.path / "votes.jsonl"
    with locked(file):
        pass
    disk.leave(4096)  # a page, which the first part of the line fills
    long = vote(0).model_copy(update={"first": "long " * 2000})
    with pytest.raises(OSError, match="No space left"):
        add_vote(file, long)
    assert file.read_bytes() == b""
    disk.make_room()
    add_vote(file, long)
    assert read_votes(file)[0].first == long.first
