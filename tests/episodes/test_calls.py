"""Calls of tools in the text of a turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rlhf_pipeline.episodes.calls import Malformed, ToolCall, calls_in

ADD = ToolCall("add", {"a": 1, "b": 2})
FORMS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "without its end": '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}',
    "a list": '<tool_call>[{"name": "add", "arguments": {"a": 1, "b": 2}}]</tool_call>',
    "arguments as text": '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}',
    "llama": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "llama with its token": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "llama with a type": '{"type": "function", "function": "add", "parameters": {"a": 1, "b": 2}}',
    "llama's own functions": '<function=add>{"a": 1, "b": 2}</function>',
    "qwen's coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]',
    "a list in newer mistral": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2} [0]',
    "newer mistral": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}',
    "openai": '<tool_call>{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}</tool_call>',
}
PIECES = (
    "<tool_call>", "</tool_call>", "<function=", "add>", "</function>", "<parameter=a>",
    "</parameter>", "<|python_tag|>", '{"name": "add"', ', "arguments": {"a": 1}', "}", "{", "[",
    "]", '"', "1", "\n",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_read_in_each_common_form(form, tokenizer):
    assert calls_in(FORMS[form], tokenizer) == [ADD]
    if not form.startswith("llama with") and form != "llama":
        assert calls_in(f"I add them. {FORMS[form]}", tokenizer) == [ADD]


def test_several_calls_keep_their_order(tokenizer):
    mistral = '[TOOL_CALLS]a[ARGS]{"x": [{"y": "[0]"}]}[TOOL_CALLS]b[ARGS]{}'
    assert calls_in(mistral, tokenizer) == [
        ToolCall("a", {"x": [{"y": "[0]"}]}),
        ToolCall("b", {}),
    ]
    text = FORMS["hermes"] + FORMS["hermes"].replace("add", "sub")
    assert [call.name for call in calls_in(text, tokenizer)] == ["add", "sub"]


@pytest.mark.parametrize(
    "text",
    [
        "It is 3.",
        "",
        '{"colour": "red"}',
        "<tool>add</tool>",
        "a { b",
        "{1, 2}",
        '{"name": "Ada", "age": 36}',
    ],
)
def test_other_text_contains_no_call(text, tokenizer):
    assert calls_in(text, tokenizer) == []


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>add 1 2</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
        '<tool_call>"add"</tool_call>',
        "<tool_call></tool_call>",
    ],
)
def test_what_begins_like_a_call_but_is_none_says_what_is_expected(text, tokenizer):
    (found,) = calls_in(text, tokenizer)
    assert isinstance(found, Malformed) and '"arguments"' in found.reason


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_no_text_breaks_the_reading(text):
    for call in calls_in(text, None):
        assert isinstance(call, ToolCall | Malformed)


def test_a_response_template_reads_its_own_form_after_the_prompt(tokenizer):
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    called = {"open": ["@@"], "close": ["%%"], "content": "json", "repeats": True}
    own.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "Assistant:",
        "fields": {"tool_calls": called, "content": {"content": "text"}},
    }
    prompt = "\n\nHuman: Add.\n\nAssistant:"
    text = 'So. @@{"name": "add", "arguments": {"a": 1, "b": 2}}%%'
    assert calls_in(text, own, prompt) == [ADD]
    assert calls_in(FORMS["hermes"], own, prompt) == []  # its own form alone
    (found,) = calls_in("@@{broken%%", own, prompt)
    assert isinstance(found, Malformed) and "JSON" in found.reason
