from __future__ import annotations

import pytest

from rlhf_pipeline.data.records import Example, Message, Unused

NAME = "pvduy/sharegpt_alpaca_oa_vicuna_format"
ASKED = Message("user", "Name a colour.")


def test_rows(records) -> None:
    assert records(NAME) == [
        Example((ASKED,), "Blue."),
        Example(
            (ASKED, Message("assistant", "Blue."), Message("user", "Another\none, please.")), "Red."
        ),
    ]


@pytest.mark.parametrize("separator", ["</s>", "</s> ", " </s>\n", "\n", " "])
def test_all_separators_of_turns(records, separator: str) -> None:
    prompt = f"USER: Name a colour. ASSISTANT: Blue.{separator}USER: Another? ASSISTANT:"
    assert records(NAME, {"prompt": prompt, "label": "Red.</s>\n"}) == [
        Example((ASKED, Message("assistant", "Blue."), Message("user", "Another?")), "Red.")
    ]


def test_text_before_the_first_turn_is_a_system_message(records) -> None:
    row = {"prompt": "Be brief.\n\nUSER: Name a colour. ASSISTANT: ", "label": "Blue."}
    assert records(NAME, row) == [Example((Message("system", "Be brief."), ASKED), "Blue.")]


def test_a_name_within_a_word_is_no_turn(records) -> None:
    row = {"prompt": "USER: What is a SUPERUSER: role or name? ASSISTANT:", "label": "A role."}
    assert records(NAME, row) == [
        Example((Message("user", "What is a SUPERUSER: role or name?"),), "A role.")
    ]


@pytest.mark.parametrize("prompt", ["USER: Name a colour.", "USER: Hi ASSISTANT: Hello", "Hi", ""])
def test_no_turn_for_the_answer(records, prompt: str) -> None:
    assert records(NAME, {"prompt": prompt, "label": "Blue."}) == [
        Unused("the prompt does not end with 'ASSISTANT:'")
    ]


def test_no_label(records, source_rows) -> None:
    assert records(NAME, source_rows[NAME][0] | {"label": None}) == [
        Unused("column 'label' is NoneType, not a string")
    ]
