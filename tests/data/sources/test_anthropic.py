from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rlhf_pipeline.data.records import Example, Message, Unused, normalized_prompt
from rlhf_pipeline.data.sources.adapter import MalformedRowError
from rlhf_pipeline.data.sources.column_maps import parse_anthropic as parse

REAL = (
    Path(__file__).parents[3] / ".." / "shared" / "data" / "hh-rlhf" / "harmless-base-test.jsonl.gz"
)
NAME = "Anthropic/hh-rlhf"


def test_the_shared_turns_are_the_prompt(records) -> None:
    assert records(NAME) == [
        Example(
            (
                Message("user", "How do I clean fish?"),
                Message("assistant", "With a sharp knife."),
                Message("user", "And then?"),
            ),
            "Rinse it.",
            "Who cares?",
        ),
        Unused("the dialogues differ before the last answer"),
    ]


def test_white_space_within_a_turn_stays() -> None:
    start = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Why?\nHuman: he said.\n\nAssistant:"
    assert parse({"chosen": start + " Because.", "rejected": start + "No\n\nand no\n"}) == Example(
        (
            Message("user", "Hi"),
            Message("assistant", "Hello."),
            Message("user", "Why?\nHuman: he said."),
        ),
        "Because.",
        "No\n\nand no",
    )


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        ("\n\nHuman: a\n\nAssistant: b", None, "column 'rejected' is NoneType, not a string"),
        (
            "\n\nHuman: a\n\nAssistant: b",
            "\n\nHuman: c\n\nAssistant: d",
            "the dialogues differ before the last answer",
        ),
        (
            "\n\nHuman: a\n\nAssistant: b",
            "\n\nHuman: a",
            "the dialogue does not end with the assistant",
        ),
        (
            "Human: a\n\nAssistant: b",
            "\n\nHuman: a\n\nAssistant: b",
            "the dialogue does not start with a turn",
        ),
        ("", "", "the dialogue does not start with a turn"),
    ],
)
def test_what_does_not_parse(chosen: str, rejected: str | None, reason: str) -> None:
    with pytest.raises(MalformedRowError) as error:
        parse({"chosen": chosen, "rejected": rejected})
    assert str(error.value) == reason


def test_a_prompt_is_the_same_in_every_data_set_of_these_dialogues(records) -> None:
    names = (NAME, "Dahoas/rm-static", "Dahoas/full-hh-rlhf", "yitingxie/rlhf-reward-datasets")
    assert {normalized_prompt(records(name)[0].prompt) for name in names} == {
        "user: how do i clean fish?\nassistant: with a sharp knife.\nuser: and then?"
    }


@pytest.fixture
def real() -> list[tuple[str, Example | Unused]]:
    if not REAL.is_file():
        pytest.skip(f"the real data is not there: {REAL}")
    from rlhf_pipeline.config.split import SourceConfig
    from rlhf_pipeline.data.source import read

    return list(read(SourceConfig(name=NAME, path=str(REAL)), 0))


def test_real_rows(real: list[tuple[str, Example | Unused]]) -> None:
    assert len(real) == 2312
    (place, first), (_, second) = real[:2]
    assert place == "harmless-base-test.jsonl.gz:1"
    assert isinstance(first, Example)
    assert [message.role for message in first.prompt] == ["user", "assistant"] * 2 + ["user"]
    assert first.prompt[0].content == "what are some pranks with a pen i can do?"
    assert first.chosen.startswith("No, sorry!  All of these involve a pen,")
    assert first.rejected.startswith("There are lots of funny things you can do with pens,")
    assert second.prompt[0].content == "How much alcohol can I drink per day?"
    # Checked by hand: four empty answers; in nine rows the Assistant speaks twice in a row, in
    # five of these in only one of the two dialogues.
    assert Counter(row.reason for _, row in real if isinstance(row, Unused)) == {
        "the chosen answer is empty": 4,
        "the dialogues differ before the last answer": 5,
        "the prompt's turns are not user and assistant in alternation": 4,
    }
    assert [int(place.rpartition(":")[2]) for place, row in real if isinstance(row, Unused)] == [
        87, 517, 668, 764, 926, 1104, 1255, 1320, 1689, 1850, 1951, 1953, 2037,
    ]  # fmt: skip
