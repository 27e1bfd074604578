from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.config.data import SourceConfig
from rlhf_pipeline.data.records import BadRow, Comparison, Message
from rlhf_pipeline.data.sources.jsonl import SOURCE
from rlhf_pipeline.errors import ConfigError

USER = {"role": "user", "content": "Why?"}


def read(tmp_path: Path, **row: Any) -> Comparison | BadRow:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"prompt": "Why?", "chosen": "Because.", "rejected": "No."} | row) + "\n")
    (only,) = SOURCE.read(SourceConfig(name="jsonl", path=str(path)), 0)
    return only


def test_a_string_is_one_user_turn(tmp_path: Path) -> None:
    assert read(tmp_path) == Comparison("own.jsonl:1", "jsonl", (Message("user", "Why?"),), "Because.", "No.")


def test_a_dialogue(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be kind."}, USER, {"role": "assistant", "content": "So."}, USER]
    record = read(tmp_path, prompt=messages)
    assert isinstance(record, Comparison)
    assert record.prompt == (
        Message("system", "Be kind."),
        Message("user", "Why?"),
        Message("assistant", "So."),
        Message("user", "Why?"),
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": None}, "column 'prompt' is NoneType, not a string"),
        ({"prompt": ["Why?"]}, "a message of the prompt is not an object with role and content"),
        ({"prompt": [{"role": "user"}]}, "column 'content' is missing"),
        ({"prompt": [{"role": "human", "content": "a"}]}, "a message's role is not one of system, user, assistant"),
        ({"prompt": []}, "the prompt does not end with a user's turn"),
        ({"prompt": [USER, {"role": "assistant", "content": "a"}]}, "the prompt does not end with a user's turn"),
        ({"prompt": [USER, USER]}, "the prompt's turns are not user and assistant in alternation"),
        (
            {"prompt": [USER, {"role": "system", "content": "late"}, USER]},
            "the prompt's turns are not user and assistant in alternation",
        ),
        ({"prompt": " \n"}, "a turn of the prompt is empty"),
        ({"chosen": ""}, "the chosen answer is empty"),
        ({"rejected": "  "}, "the rejected answer is empty"),
        ({"rejected": 7}, "column 'rejected' is int, not a string"),
        ({"chosen": "No. "}, "the two answers are equal"),
        ({"chosen": "half \ud83d of a pair"}, "half a surrogate pair, which is no character"),
    ],
)
def test_bad_rows(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    assert read(tmp_path, **row) == BadRow("own.jsonl:1", reason)


def test_a_path_is_required() -> None:
    with pytest.raises(ConfigError, match="set its `path`"):
        SOURCE.read(SourceConfig(name="jsonl"), 0)
