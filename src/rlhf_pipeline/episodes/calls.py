"""Calls of tools in the text of a turn, in the forms that open models write."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from rlhf_pipeline.data.token_contract import Tokenizer


class ToolCall(NamedTuple):
    """A call that the policy has written."""

    name: str
    arguments: dict[str, Any]


class Malformed(NamedTuple):
    """Text that begins like a call, but is none."""

    reason: str


_MARKED = re.compile(  # Hermes and Qwen; Qwen's coder, and Llama 3.1's functions; Mistral
    r"<tool_call>(?P<hermes>.*?)(?:</tool_call>|\Z)"
    r"|<function=(?P<name>[^>\n]+)>(?P<body>.*?)(?:</function>|\Z)"
    r"|\[TOOL_CALLS\]\s*(?:(?P<mistral>[\w.-]+)\[ARGS\])?(?P<list>.*?)(?=\[TOOL_CALLS\]|\Z)",
    re.DOTALL,
)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_LLAMA = re.compile(
    r"\s*(?:<\|python_tag\|>\s*)?(?=\{\s*\"(?:type|name|function)\"\s*:)(?=.*\"(parameters|arguments)\")",
    re.DOTALL,
)
_FORM = '{"name": ..., "arguments": {...}}'


def calls_in(text: str, tokenizer: Tokenizer, prompt: str = "") -> list[ToolCall | Malformed]:
    """The calls in a turn, in their order. `text` contains special tokens, but not its EOS.

    A tokenizer with a `response_template` reads its own form after `prompt`. The forms of the
    others are those of Hermes and Qwen (`<tool_call>` with JSON), of Qwen's coder
    (`<function=...>`), of Mistral (`[TOOL_CALLS]`), and of Llama 3 (JSON alone, or after
    `<|python_tag|>`).
    """
    if getattr(tokenizer, "response_template", None):
        try:
            message = tokenizer.parse_response(text, prefix=prompt)
        except Exception as error:  # what the template does not match
            return [Malformed(f"{type(error).__name__}: {error}")]
        return [_call(one) for one in message.get("tool_calls") or ()]
    return [*_common(text)]


def _common(text: str) -> Iterator[ToolCall | Malformed]:
    marked = [*_MARKED.finditer(text)]
    for found in marked:
        inner = found["hermes"]
        if inner is not None and (coded := _MARKED.search(inner)) and coded["name"]:  # Qwen's coder
            found, inner = coded, None
        if inner is not None:
            yield from _of_json(inner)
        elif found["list"] is not None:
            yield from _of_json(found["list"], found["mistral"])
        elif values := dict(_PARAMETER.findall(found["body"])):
            yield ToolCall(found["name"].strip(), {k: _value(v) for k, v in values.items()})
        else:
            yield from _of_json(found["body"] or "{}", found["name"].strip())
    if not marked and (start := _LLAMA.match(text)):
        yield from _of_json(text[start.end() :])


def _of_json(text: str, name: str | None = None) -> Iterator[ToolCall | Malformed]:
    try:
        found, _ = json.JSONDecoder().raw_decode(text.strip())
    except (ValueError, RecursionError) as error:
        yield Malformed(f"found no JSON ({error}), expected {_FORM}")
        return
    for one in found if isinstance(found, list) else [found]:
        yield _call({"name": name, "arguments": one} if name else one)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _call(found: Any) -> ToolCall | Malformed:
    inner = found.get("function", found) if isinstance(found, dict) else None
    if isinstance(inner, str):  # Llama's {"type": "function", "function": NAME, ...}
        inner = {**found, "name": inner}
    if isinstance(inner, dict) and isinstance(inner.get("name"), str):
        arguments = inner.get("arguments", inner.get("parameters", {}))
        arguments = _value(arguments) if isinstance(arguments, str) else arguments
        if isinstance(arguments, dict):
            return ToolCall(inner["name"], arguments)
    return Malformed(f"found {json.dumps(found)[:200]}, expected {_FORM}")
