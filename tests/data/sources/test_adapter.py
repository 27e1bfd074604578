import pytest

from rlhf_pipeline.config.split import ColumnMap
from rlhf_pipeline.data.records import Example, Message, Text, Unused
from rlhf_pipeline.data.sources.adapter import MalformedRowError, outcome, parser
from rlhf_pipeline.data.sources.registry import known_columns

USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
NO = {"role": "assistant", "content": "No."}
QUESTION = (Message("user", "Why?"),)
ADD = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [ADD]}
CALLED = Message(
    "assistant",
    "",
    '{"tool_calls": [{"id": "1", "function": {"name": "add", "arguments": {"a": 1}}}]}',
)
DIALOGUE = [
    {"role": "system", "content": "Be kind."},
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello"},
    USER,
]
PROMPT = (Message("system", "Be kind."), Message("user", "Hi"), Message("assistant", "Hello"))
PROMPT += QUESTION
COMPARED = Example(PROMPT, "Because.", "No.")
PAIR = {"prompt": "q", "chosen": "c", "rejected": "r"}
SCORED = {"prompt": "q", "answers": ("a", "b"), "scores": ("x", "y")}
SIMPLE = Example(QUESTION, "Because.", "No.")


def record(row, columns):
    return outcome(parser(columns), row)


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        (PAIR, {"q": "Why?", "c": "Because.", "r": "No."}, SIMPLE),
        (PAIR, {"q": DIALOGUE, "c": [ANSWER], "r": [NO]}, COMPARED),
        (PAIR, {"q": "Why?", "c": [USER, ANSWER], "r": "No."}, SIMPLE),
        ({"chosen": "c", "rejected": "r"}, {"c": [*DIALOGUE, ANSWER], "r": [*DIALOGUE, NO]},
         COMPARED),
        (SCORED, {"q": "Why?", "a": "No.", "b": "Because.", "x": 1, "y": 1.5}, SIMPLE),
        (SCORED, {"q": "Why?", "a": [USER, ANSWER], "b": [NO], "x": "10", "y": "9"}, SIMPLE),
        ({"response": "a"}, {"a": [*DIALOGUE, ANSWER]}, Example(PROMPT, "Because.")),
        *(({"prompt": ["q", "input"], "response": "a"}, {"q": "Sum up.", "input": more, "a": "4"},
           Example((Message("user", prompt),), "4"))
          for more, prompt in (("2 and 2", "Sum up.\n\n2 and 2"), (" ", "Sum up."),
                               ("", "Sum up."), (None, "Sum up."))),
        *(({"prompt": "q", "response": "a", "label": "up"},
           {"q": "Why?", "a": "Because.", "up": value}, Example(QUESTION, "Because.", label=label))
          for value, label in ((True, True), (0, False), ("1", True), ("False", False))),
        *((SCORED | {"label": "up"},
           {"q": "Why?", "a": "No.", "b": "Because.", "x": 1, "y": score, "up": value}, expected)
          for score, value, expected in (
              (1, True, Example(QUESTION, "No.", "Because.", label=True)),
              (1, False, Example(QUESTION, "No.", "Because.", label=False)),
              (2, None, SIMPLE), (2, "", SIMPLE),
          )),
        *(({"prompt": "q", "response": "a", "label": "up"},
           {"q": "Why?", "a": "Because.", "up": value},
           Unused("column 'up' is neither true nor false, 1 nor 0")) for value in (None, 4)),
        ({"messages": "m"}, {"m": [USER | {"role": "prompter"}, ANSWER | {"role": "bot"}]},
         Example(QUESTION, "Because.")),
        ({"text": "t"}, {"t": "Once upon a time"}, Text("Once upon a time")),
        # The true answer for rewards, also beside a comparison.
        *(({"prompt": "q", "reference": "s.a"}, {"q": "Why?", "s": {"a": value}},
           Example(QUESTION, reference=reference))
          for value, reference in (("4", "4"), (4, "4"), (0.5, "0.5"), (None, None))),
        (SCORED | {"reference": "b"}, {"q": "Why?", "a": "No.", "b": "Because.", "x": 1, "y": 2},
         Example(QUESTION, "Because.", "No.", "Because.")),
        ({"prompt": "q", "reference": "a"}, {"q": "Why?", "a": ["4"]},
         Unused("column 'a' is list, not a string or a number")),
        (SCORED, {"q": "Why?", "a": "No.", "b": "Because.", "x": 1, "y": "1.0"},
         Unused("the two answers have the same score", bad=False)),
        *((SCORED, {"q": "Why?", "a": "No.", "b": "Because.", "x": 1, "y": score},
           Unused("column 'y' is not a finite number"))
          for score in ("nan", "", None, "high", [1], float("inf"), 10**400)),
        ({"text": "t"}, {"t": None}, Unused("column 't' is NoneType, not a string")),
        *(({"chosen": "c", "rejected": "r"}, row,
           Unused("no mapped column contains the prompt: set columns.prompt"))
          for row in ({"c": "Because.", "r": "No."}, {"c": [ANSWER], "r": [NO]})),
    ],
)  # fmt: skip
def test_every_form(columns, row, expected):
    assert record(row, ColumnMap(**columns)) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"a": {"b": [{"c": "No."}, {"c": "So."}]}}, Text("So.")),
        ({"a": {"b": {"1": {"c": "So."}}}}, Text("So.")),
        ({"a": {"b": []}, "a.b.1.c": "So."}, Text("So.")),  # a column of this name comes first
        ({"a": {"b": [{"c": "No."}]}},
         Unused("the list of column 'a.b.1.c' is shorter", bad=False)),
        *((row, Unused("column 'a.b.1.c' is missing; the columns are 'a'"))
          for row in ({"a": None}, {"a": ["text"]}, {"a": {"b": {"d": "text"}}})),
    ],
)  # fmt: skip
def test_dots_select_nested_columns_and_items_of_lists(row, expected):
    assert record(row, ColumnMap(text="a.b.1.c")) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": None}, "column 'prompt' is NoneType, not a string or a list of messages"),
        ({"prompt": ["Why?"]}, "a message in column 'prompt' is not an object with role and "
         "content"),
        ({"prompt": [{"role": "user"}]}, "column 'content' is missing"),
        ({"prompt": [{"role": "judge", "content": "a"}]}, "a message's role is not one of system, "
         "user, human, prompter, assistant, gpt, bot, tool"),
        ({"prompt": []}, "column 'prompt' is not a list of messages"),
        ({"prompt": [USER, ANSWER]}, "the dialogue in column 'prompt' does not end with the user"),
        ({"chosen": 7}, "column 'chosen' is int, not a string or a list of messages"),
        ({"chosen": [ANSWER, USER]},
         "the dialogue in column 'chosen' does not end with the assistant"),
        ({"chosen": [USER, USER, ANSWER]}, "the columns contain different prompts"),
        ({"chosen": [USER, ANSWER], "rejected": [*DIALOGUE, NO]},
         "the columns contain different prompts"),
    ],
)  # fmt: skip
def test_bad_rows(row, reason):
    given = {"prompt": "Why?", "chosen": "Because.", "rejected": "No."} | row
    columns = ColumnMap(prompt="prompt", chosen="chosen", rejected="rejected")
    assert record(given, columns) == Unused(reason)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # TRL's preference formats: standard, conversational, conversational with implicit prompt.
        ({"prompt": "Why?", "chosen": "Because.", "rejected": "No.", "score": 3}, SIMPLE),
        ({"prompt": DIALOGUE, "chosen": [ANSWER], "rejected": [NO]}, COMPARED),
        ({"chosen": [*DIALOGUE, ANSWER], "rejected": [*DIALOGUE, NO], "margin": 1}, COMPARED),
        # Prompt and completion, language modelling, prompts alone.
        ({"prompt": "Why?", "completion": "Because."}, Example(QUESTION, "Because.")),
        ({"messages": [*DIALOGUE, ANSWER], "id": 7}, Example(PROMPT, "Because.")),
        ({"prompt": DIALOGUE}, Example(PROMPT)),
        ({"prompt": "Why?"}, Example(QUESTION)),
        # OpenAI's content in parts, and turns of tools, which are context.
        ({"prompt": [USER | {"content": [{"type": "text", "text": "Wh"}, {"text": "y?"}]}],
          "completion": [ANSWER]}, Example(QUESTION, "Because.")),
        ({"messages": [USER, {"role": "assistant", "content": "add(1, 2)"},
                       {"role": "tool", "name": "add", "content": "3"}, ANSWER]},
         Example((*QUESTION, Message("assistant", "add(1, 2)"),
                  Message("tool", "3", '{"name": "add"}')), "Because.")),
        ({"prompt": [USER], "tools": None}, Example(QUESTION)),
        # TRL's preferences with an implicit prompt in one string each, and what is not text.
        ({"chosen": "It is so.", "rejected": "It is not."},
         Unused("no mapped column contains the prompt: set columns.prompt")),
        # Schemas of tools, as a list or its JSON, and calls, whose arguments OpenAI has as JSON.
        *(({"messages": [USER, CALLING, {"role": "tool", "content": "3"}, ANSWER], "tools": tools},
           Example((*QUESTION, CALLED, Message("tool", "3")), "Because.", tools=kept))
          for tools, kept in (([{"name": "add"}], '[{"name": "add"}]'), (None, None),
                              ('[{"name": "add"}]', '[{"name": "add"}]'))),
        ({"messages": [USER, CALLING]},
         Unused("the last answer calls a tool, which no stage learns", bad=False)),
        ({"messages": [USER, ANSWER], "tools": "add"},
         Unused("column 'tools' is not a list of objects, nor its JSON")),
        ({"messages": [USER, CALLING | {"tool_calls": "add"}]},
         Unused("the tool_calls of a message are not a list of objects")),
        ({"messages": [USER | {"content": [{"type": "image_url"}]}, ANSWER]},
         Unused("a content part of type image_url, not text")),
        # TRL's unpaired preference formats: standard and conversational.
        ({"prompt": "Why?", "completion": "Because.", "label": True},
         Example(QUESTION, "Because.", label=True)),
        ({"prompt": DIALOGUE, "completion": [ANSWER], "label": False},
         Example(PROMPT, "Because.", label=False)),
    ],
)  # fmt: skip
def test_the_formats_of_trl_need_no_map(row, expected):
    assert record(row, known_columns(row)) == expected


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        (
            ["prompt", "chosen", "rejected", "messages"],
            "columns: {prompt: prompt, chosen: chosen, rejected: rejected} or columns: {chosen: "
            "chosen, rejected: rejected} or columns: {messages: messages}",
        ),
        (["chosen", "rejected", "messages"], "columns: {chosen: chosen, rejected: rejected} or "
         "columns: {messages: messages}"),
        # The label may mark the bad ones.
        (["messages", "label"], "columns: {messages: messages}"),
        *((names, "columns: {prompt: COLUMN, chosen: COLUMN, rejected: COLUMN} or columns: "
           "{prompt: COLUMN, response: COLUMN}")
          for names in (["prompt", "answer"], ["prompt", " chosen", "rejected"])),
        # ShareGPT and Alpaca.
        (["id", "conversations"], "columns: {messages: conversations}"),
        (["instruction", "input", "output"],
         "columns: {prompt: [instruction, input], response: output}"),
        (["instruction", "output", "text"], "columns: {prompt: instruction, response: output}"),
    ],
)  # fmt: skip
def test_other_columns_need_a_line_which_the_message_states(names, lines):
    with pytest.raises(MalformedRowError) as error:
        known_columns(names)
    assert str(error.value) == (
        f"the columns do not say which of them to read; they are {str(names)[1:-1]}. Fix: add to "
        f"the source a line such as {lines}"
    )
