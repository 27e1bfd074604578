from __future__ import annotations

from rlhf_pipeline.data.records import Example, Message, Text
from rlhf_pipeline.data.tokenization import corpus


def test_every_prompt_and_answer_is_read_as_dialogue(write_records) -> None:
    dialogue = (
        Message("system", "Be kind."),
        Message("user", "Why?"),
        Message("assistant", "So."),
        Message("user", "And?"),
    )
    first = write_records(
        "first",
        Example((Message("user", "Why?"),), "Because.", "No."),
        Example((Message("user", "How?"),)),
        Example((Message("user", "Who?"),), "Me."),
    )
    second = write_records("second", Example(dialogue, "Ja.", "Nein."))
    assert list(corpus([first, second])) == [
        "\n\nHuman: Why?\n\nAssistant: Because.",
        "\n\nAssistant: No.",
        "\n\nHuman: How?",
        "\n\nHuman: Who?\n\nAssistant: Me.",
        "Be kind.\n\nHuman: Why?\n\nAssistant: So.\n\nHuman: And?\n\nAssistant: Ja.",
        "\n\nAssistant: Nein.",
    ]


def test_a_source_of_several_batches(write_records) -> None:
    many = write_records(
        "many", *(Example((Message("user", f"Question {n}?"),), "Yes.") for n in range(1001))
    )
    texts = list(corpus([many]))
    assert len(texts) == 1001
    assert texts[1000] == "\n\nHuman: Question 1000?\n\nAssistant: Yes."


def test_texts_are_not_part_of_the_corpus(write_records) -> None:
    assert list(corpus([write_records("texts", Text("a document")), write_records("empty")])) == []
