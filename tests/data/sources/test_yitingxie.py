from __future__ import annotations

import pytest

from rlhf_pipeline.data.records import Example, Message, Unused

NAME = "yitingxie/rlhf-reward-datasets"
EXAMPLE = Example(
    (
        Message("user", "How do I clean fish?"),
        Message("assistant", "With a sharp knife."),
        Message("user", "And then?"),
    ),
    "Rinse it in cold water.",
    "I don't know.",
)


def test_a_row(records) -> None:
    assert records(NAME) == [EXAMPLE]


@pytest.mark.parametrize("after_prompt", ["", " ", "\n\n"])
@pytest.mark.parametrize("before_prompt", ["", " ", "\n\n"])
def test_white_space_at_the_cut_does_not_matter(
    records, before_prompt: str, after_prompt: str
) -> None:
    prompt = "Human: How do I clean fish?\n\nAssistant: With a sharp knife.\n\nHuman: And then?"
    row = {
        "prompt": before_prompt + prompt + after_prompt,
        "chosen": "\n\nAssistant: Rinse it in cold water.",
        "rejected": " Assistant:I don't know.",
    }
    assert records(NAME, row) == [EXAMPLE]
    cut_later = {
        "prompt": row["prompt"].strip() + "\n\nAssistant:",
        "chosen": EXAMPLE.chosen,
        "rejected": " I don't know.",
    }
    assert records(NAME, cut_later) == [EXAMPLE]


def test_an_answer_with_a_further_turn(records, source_rows) -> None:
    row = source_rows[NAME][0] | {
        "chosen": "Assistant: Rinse it.\n\nHuman: Why?\n\nAssistant: For health."
    }
    assert records(NAME, row) == [Unused("the dialogues differ before the last answer")]


def test_an_answer_without_a_speaker(records, source_rows) -> None:
    row = source_rows[NAME][0] | {"rejected": "I don't know."}
    assert records(NAME, row) == [Unused("the dialogue does not end with the assistant")]
