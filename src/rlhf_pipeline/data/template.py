"""Apply the chat template. Only this module turns dialogues into text for a model.

The functions take batches, which cost the template engine half as much; `ids` are for errors.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from typing import Any

from jinja2 import Template, TemplateError

from rlhf_pipeline.data.records import Conversation
from rlhf_pipeline.data.token_contract import Reader, Tokenizer, any_of, control_tokens
from rlhf_pipeline.errors import ArtifactError

HUMAN_ASSISTANT_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{% set it = tool.function %}"
    "{{ it.name + '(' + it.parameters.properties | join(', ') + '): ' + it.description + '\\n' }}"
    "{% endfor %}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}"
    "{% elif message.role == 'user' %}{{ '\\n\\nHuman: ' + message.content }}"
    "{% elif message.role == 'tool' %}{{ '\\n\\nTool: ' + message.content }}"
    "{% else %}{{ '\\n\\nAssistant: ' + message.content }}"
    "{% for call in message.tool_calls or [] %}{% set it = call.function or call %}<tool_call>"
    "{{ {'name': it.name, 'arguments': it.arguments} | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)
"""Chat template for base models without one, in the format of Anthropic's dialogues."""

_TAG = re.compile(r"</?\|?\w+\|?>|\[/?[A-Z_]+\]")
_PLAIN = Template(HUMAN_ASSISTANT_TEMPLATE)
_TODAY = re.compile(r"""strftime_now\(\s*(['"])(?P<format>.*?)\1\s*\)""")


def fix_date(tokenizer: Tokenizer, day: date) -> None:
    """Write a fixed date into chat templates that render today's by `strftime_now(format)`.

    So results and exported tokenizers do not depend on the day. Raises ArtifactError if a template
    does anything else with that function than to call it with a literal format, or to test for it.
    """

    def fixed(template: str) -> str:
        found = _TODAY.sub(lambda call: f'"{day.strftime(call["format"])}"', template)
        if re.search(r"\bstrftime_now\b(?!\s+is\s+(not\s+)?defined)", found):
            raise ArtifactError(
                f"tokenizer {tokenizer.name_or_path}: the chat template uses strftime_now without "
                "a literal format, expected a call with one like '%d %b %Y'. Fix: write a fixed "
                "date into its chat template, and set the path to the changed folder."
            )
        return found

    template = tokenizer.chat_template
    if isinstance(template, dict):
        tokenizer.chat_template = {name: fixed(one) for name, one in template.items()}
    elif template:
        tokenizer.chat_template = fixed(template)


def render_prompts(
    tokenizer: Tokenizer, ids: Sequence[str], prompts: Sequence[Conversation]
) -> list[str]:
    """Render prompts with the template's generation prompt. Raises ArtifactError if the tokenizer
    has no chat template, or its template rejects a dialogue."""
    return render_dialogues(tokenizer, ids, prompts, add_generation_prompt=True)


def render_dialogues(
    tokenizer: Tokenizer,
    ids: Sequence[str],
    dialogues: Sequence[Conversation],
    *,
    add_generation_prompt: bool = False,
) -> list[str]:
    """Render whole dialogues, including the last answer; raises like `render_prompts`."""
    if not tokenizer.chat_template:
        raise ArtifactError(
            "the tokenizer has no chat template. Fix: set its `chat_template`, for example to "
            "HUMAN_ASSISTANT_TEMPLATE."
        )
    if not dialogues:
        return []
    settings = {"add_generation_prompt": add_generation_prompt}
    render = partial(tokenizer.apply_chat_template, tokenize=False, **settings)
    try:
        if not any("tools" in dialogue[0] for dialogue in dialogues):
            rendered: list[str] = render(list(dialogues))
        else:
            rendered = [render(dialogue, tools=dialogue[0].get("tools")) for dialogue in dialogues]
    except Exception as error:  # what the template raises; `include` raises a TypeError
        if len(dialogues) > 1:  # find the first one that fails
            for name, dialogue in zip(ids, dialogues, strict=True):
                render_dialogues(tokenizer, [name], [dialogue], **settings)
        roles = ", ".join(message["role"] for message in dialogues[0])
        raise ArtifactError(
            f"{ids[0]}: the tokenizer's chat template rejects the turns {roles}: {error}. Fix: "
            "correct the template, or remove such rows"
        ) from error

    for name, dialogue, found in zip(ids, dialogues, rendered, strict=True):
        plain = [{key: turn[key] for key in ("role", "content")} for turn in dialogue]
        said = [t | {"role": "assistant"} if t["role"] == "tool" else t for t in plain]
        uses_tools = any({"tools", "tool_calls"} & turn.keys() for turn in dialogue)
        fault = None
        if uses_tools or said != plain:
            with suppress(TemplateError):  # a template that rejects the plain turns knows tools
                text = render(plain)
                if uses_tools and text == found:
                    fault = "neither tools nor tool_calls"
                elif said != plain and render(said) == text:
                    fault = "a tool's turn as one of the assistant"
        if fault:
            raise ArtifactError(
                f"{name}: the tokenizer's chat template shows {fault}. Fix: use a model whose "
                "template knows tools, or remove these rows."
            )
    return rendered


def render_responses(
    reader: Reader,
    ids: Sequence[str],
    prompts: Sequence[Conversation],
    prompt_texts: Sequence[str],
    responses: Sequence[str | dict[str, Any] | None],
) -> list[str | None]:
    """The text that the template adds to each prompt's text, up to its EOS.

    A response is a text, a message of the assistant, or None. Any EOS of the contract may end the
    turn; what follows is cut off: a line break in ChatML, a second EOS in Phi-3. Without EOS, the
    tokenizer's is added. `prompt_texts` come from `render_prompts`; ArtifactError is raised if a
    dialogue does not begin with them, so that the model would generate after other text than it
    trained on.
    """
    tokenizer, contract = reader
    tokens = tokenizer.convert_ids_to_tokens(list(contract.eos_ids))
    one = "|".join(map(re.escape, tokens))
    # The last EOS, with those directly before it: the first of them ends the turn.
    last = re.compile(rf"(?P<end>{one})(\s*({one}))*(?!.*({one}))", re.DOTALL)
    given = [row for row, response in enumerate(responses) if response is not None]
    said = [
        turn if isinstance(turn := responses[row], dict) else {"role": "assistant", "content": turn}
        for row in given
    ]
    dialogues = [[*prompts[row], turn] for row, turn in zip(given, said, strict=True)]
    rendered = render_dialogues(tokenizer, [ids[row] for row in given], dialogues)
    texts: list[str | None] = [None] * len(responses)
    for row, dialogue in zip(given, rendered, strict=True):
        start = prompt_texts[row]
        if not dialogue.startswith(start):
            raise ArtifactError(
                f"{ids[row]}: the chat template begins the dialogue with "
                f"{dialogue[: len(start)]!r}, expected its own prompt {start!r}. Fix: use a "
                "template that begins every assistant turn with its generation prompt."
            )
        end = last.search(dialogue, len(start))
        text = dialogue[len(start) : end.end("end")] if end else dialogue[len(start) :] + tokens[0]
        texts[row] = text
    return texts


def render_replies(
    reader: Reader, replies: Conversation, tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The text between the EOS of an assistant's turn and its next one: replies to the turn, and
    the generation prompt. `tools` are the schemas that the prompt has.

    A mark stands for the turn, and no other turn is rendered: some templates render an earlier turn
    differently once the dialogue continues. Raises ArtifactError like `render_prompts`.
    """
    mark = "TURN"
    while any(mark in reply["content"] for reply in replies):
        mark += "S"
    turn: dict[str, Any] = {"role": "assistant", "content": mark}
    if calls := [reply for reply in replies if reply["role"] == "tool"]:
        # One of them, as Llama's template takes no more.
        function = {"name": calls[0].get("name", mark), "arguments": {"mark": mark}}
        call = {"id": calls[0].get("tool_call_id", mark), "type": "function", "function": function}
        turn["tool_calls"] = [call]
    first: dict[str, Any] = {"role": "user", "content": "?"}
    dialogue = [first | ({"tools": tools} if tools else {}), turn, *replies]
    (text,) = render_prompts(reader.tokenizer, ["a reply"], [dialogue])
    tokens = reader.tokenizer.convert_ids_to_tokens(list(reader.contract.eos_ids))
    found = any_of(tokens).search(text, text.rfind(mark))
    if mark not in text or found is None:
        raise ArtifactError(
            f"the tokenizer's chat template renders {text!r}, expected {' or '.join(tokens)} after "
            f"the assistant's turn {mark}. Fix: use a template that ends each turn with it."
        )
    return text[found.end() :]


def role_marks(reader: Reader) -> set[str]:
    """What the template writes around the text of another role, after which a turn begins or ends:
    texts with their line breaks, and tags. Control tokens are not among them."""
    control, marks = any_of(control_tokens(*reader)), set[str]()
    for role in "user", "tool", "system":
        with suppress(ArtifactError):  # the template does not know the role there
            text = render_replies(reader, [{"role": role, "content": "TEXT"}])
            parts = [each for part in text.split("TEXT") for each in control.split(part)]
            # Words alone are names of roles, and signs alone quote a text.
            named = (part for part in parts if re.search(r"\w", part))
            marks |= {part.strip(" ") for part in named if not part.strip().isalpha()}
            marks |= {tag for part in parts for tag in _TAG.findall(part)}
    return {mark for mark in marks if mark.strip()}


def render_turns(
    reader: Reader, name: str, prompt: Conversation, prompt_text: str
) -> list[tuple[str, bool]]:
    """Divide a prompt's text (from `render_prompts`) into pieces, with True for the assistant.

    A piece of the assistant begins where generation would begin and ends in one EOS. Raises
    ArtifactError if the template renders an earlier turn differently from the last one (some omit
    its reasoning), so that its tokens cannot be located.
    """
    pieces: list[tuple[str, bool]] = []
    written = 0
    for index, message in enumerate(prompt):
        if message["role"] != "assistant":
            continue
        history = [prompt[:index]]
        before = render_prompts(reader.tokenizer, [name], history)
        (said,) = render_responses(reader, [name], history, before, [message])
        answer = said or ""
        if not prompt_text.startswith(before[0] + answer):
            raise ArtifactError(
                f"{name}: the chat template renders the assistant's turn {answer!r} differently "
                "once the dialogue continues. Fix: set split.sft_loss to 'response', or use "
                "another template."
            )
        pieces += [(before[0][written:], False), (answer, True)]
        written = len(before[0]) + len(answer)
    return [*pieces, (prompt_text[written:], False)]


def plain_text(messages: Conversation) -> str:
    """Messages by HUMAN_ASSISTANT_TEMPLATE without special tokens, to train a tokenizer."""
    return _PLAIN.render(messages=messages, eos_token="")
