from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from rlhf_pipeline.config.data import SourceConfig
from rlhf_pipeline.data.records import BadRow, Comparison, Message
from rlhf_pipeline.data.sources.hh_rlhf import SOURCE, parse
from rlhf_pipeline.data.sources.source import MalformedRowError

REAL = Path(__file__).parents[3] / ".." / "shared" / "data" / "hh-rlhf" / "harmless-base-test.jsonl.gz"


def test_the_shared_turns_are_the_prompt() -> None:
    start = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Why?\nTell me.\n\nAssistant:"
    assert parse({"chosen": start + " Because.", "rejected": start + "No\n"}) == (
        (Message("user", "Hi"), Message("assistant", "Hello."), Message("user", "Why?\nTell me.")),
        "Because.",
        "No",
    )


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        ("\n\nHuman: a\n\nAssistant: b", None, "column 'rejected' is NoneType, not a string"),
        ("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: c\n\nAssistant: d", "the dialogues differ before the last answer"),
        ("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: a", "the dialogue does not end with the Assistant"),
        ("Human: a\n\nAssistant: b", "\n\nHuman: a\n\nAssistant: b", "the dialogue does not start with a turn"),
        ("", "", "the dialogue does not start with a turn"),
    ],
)
def test_what_does_not_parse(chosen: str, rejected: str | None, reason: str) -> None:
    with pytest.raises(MalformedRowError) as error:
        parse({"chosen": chosen, "rejected": rejected})
    assert str(error.value) == reason


def test_a_missing_column() -> None:
    with pytest.raises(MalformedRowError, match="column 'chosen' is missing"):
        parse({"rejected": "\n\nHuman: a\n\nAssistant: b"})


@pytest.fixture(scope="module")
def real() -> list[Comparison | BadRow]:
    if not REAL.is_file():
        pytest.skip(f"the real data is not there: {REAL}")
    return list(SOURCE.read(SourceConfig(name=SOURCE.name, path=str(REAL)), 0))


def test_real_rows(real: list[Comparison | BadRow]) -> None:
    assert len(real) == 2312
    first, second = real[:2]
    assert isinstance(first, Comparison)
    assert (first.id, first.source) == ("harmless-base-test.jsonl.gz:1", "Anthropic/hh-rlhf")
    assert [message.role for message in first.prompt] == ["user", "assistant"] * 2 + ["user"]
    assert first.prompt[0].content == "what are some pranks with a pen i can do?"
    assert first.chosen.startswith("No, sorry!  All of these involve a pen,")
    assert first.rejected.startswith("There are lots of funny things you can do with pens,")
    assert isinstance(second, Comparison)
    assert second.prompt[0].content == "How much alcohol can I drink per day?"


def test_real_bad_rows(real: list[Comparison | BadRow]) -> None:
    # Looked at one by one: four empty answers; in nine rows the Assistant speaks twice in a row, in five of these only
    # in one of the two dialogues.
    places = defaultdict(list)
    for row in real:
        if isinstance(row, BadRow):
            places[row.reason].append(int(row.place.rpartition(":")[2]))
    assert places == {
        "the chosen answer is empty": [87, 517, 926, 1104],
        "the dialogues differ before the last answer": [1255, 1689, 1951, 1953, 2037],
        "the prompt's turns are not user and assistant in alternation": [668, 764, 1320, 1850],
    }


def test_samples_limits_what_is_read() -> None:
    if not REAL.is_file():
        pytest.skip(f"the real data is not there: {REAL}")
    rows = SOURCE.read(SourceConfig(name=SOURCE.name, path=str(REAL), samples=3), 0)
    assert [row.id for row in rows] == [f"harmless-base-test.jsonl.gz:{line}" for line in (1, 2, 3)]
