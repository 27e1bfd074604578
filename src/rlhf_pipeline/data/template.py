"""The one place where a chat template is applied: dialogues become text for the model here and nowhere else.

All functions take batches: one call of the template engine for many dialogues costs half of many calls. `ids` name the
examples in errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jinja2 import Template, TemplateError

from rlhf_pipeline.data.records import Conversation
from rlhf_pipeline.errors import ArtifactError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUMAN_ASSISTANT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}"
    "{% elif message.role == 'user' %}{{ '\\n\\nHuman: ' + message.content }}"
    "{% else %}{{ '\\n\\nAssistant: ' + message.content + eos_token }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)
"""Chat template (Jinja) for base models that have none, in the format of Anthropic's dialogues; `bos_token` is empty
where the tokenizer has none."""

_PLAIN = Template(HUMAN_ASSISTANT_TEMPLATE)


def render_prompts(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[str], prompts: Sequence[Conversation]
) -> list[str]:
    """The prompts with the template's generation prompt.

    Raises:
        ArtifactError: the tokenizer has no chat template, or its template refuses a dialogue.
    """
    return _apply(tokenizer, ids, prompts, add_generation_prompt=True)


def render_responses(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[str],
    prompts: Sequence[Conversation],
    prompt_texts: Sequence[str],
    responses: Sequence[str],
) -> list[str]:
    """What the template writes after each prompt's text (from `render_prompts`) for a response, up to its last EOS.

    What a template adds after the EOS (a line break in ChatML) is cut off, since a model stops at the EOS; a template
    that ends a turn without EOS gets one.

    Raises:
        ArtifactError: the tokenizer has no EOS, or a dialogue does not begin with its prompt's text, so that a response
            would be trained after another text than it is generated after.
    """
    eos = tokenizer.eos_token
    if not eos:
        raise ArtifactError(
            "the tokenizer has no EOS token; set one that differs from its padding token"
        )
    dialogues = [
        [*prompt, {"role": "assistant", "content": response}]
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    texts = []
    for name, start, dialogue in zip(
        ids,
        prompt_texts,
        _apply(tokenizer, ids, dialogues, add_generation_prompt=False),
        strict=True,
    ):
        if not dialogue.startswith(start):
            raise ArtifactError(
                f"{name}: the chat template begins the whole dialogue with {dialogue[: len(start)]!r} and not with its "
                f"own prompt {start!r}; use a template whose generation prompt is how it begins an assistant's turn"
            )
        answer, found, _ = dialogue[len(start) :].rpartition(eos)
        texts.append(answer + eos if found else dialogue[len(start) :] + eos)
    return texts


def render_dialogues(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[str], dialogues: Sequence[Conversation]
) -> list[str]:
    """Whole dialogues, the assistant's last answer included, as the template writes them; raises as `render_prompts`."""
    return _apply(tokenizer, ids, dialogues, add_generation_prompt=False)


def render_turns(
    tokenizer: PreTrainedTokenizerBase, name: str, prompt: Conversation, prompt_text: str
) -> list[tuple[str, bool]]:
    """A prompt's text (from `render_prompts`) in pieces, True where the assistant speaks.

    Each of the assistant's pieces starts where generation would start and ends in one EOS, like a response.

    Raises:
        ArtifactError: the template writes an earlier turn in another way than when it was the last one (some leave the
            reasoning of earlier turns out), so that its tokens cannot be told.
    """
    pieces: list[tuple[str, bool]] = []
    written = 0
    for index in (index for index, message in enumerate(prompt) if message["role"] == "assistant"):
        history = [prompt[:index]]
        before = render_prompts(tokenizer, [name], history)
        answer = render_responses(tokenizer, [name], history, before, [prompt[index]["content"]])[0]
        if not prompt_text.startswith(before[0] + answer):
            raise ArtifactError(
                f"{name}: the chat template writes the assistant's turn {answer!r} in another way once the dialogue goes "
                "on; set split.sft_loss to 'response', or use a template that does not"
            )
        pieces += [(before[0][written:], False), (answer, True)]
        written = len(before[0]) + len(answer)
    return [*pieces, (prompt_text[written:], False)]


def plain_text(messages: Conversation) -> str:
    """Messages as HUMAN_ASSISTANT_TEMPLATE writes them, without special tokens: text to train a tokenizer on."""
    return _PLAIN.render(messages=messages, eos_token="")


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[str],
    conversations: Sequence[Conversation],
    *,
    add_generation_prompt: bool,
) -> list[str]:
    if not tokenizer.chat_template:
        raise ArtifactError(
            "the tokenizer has no chat template; set its `chat_template`, for example to HUMAN_ASSISTANT_TEMPLATE"
        )
    if not conversations:
        return []
    try:
        return tokenizer.apply_chat_template(
            list(conversations), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except TemplateError as error:
        if len(conversations) > 1:  # which one? the first that fails by itself
            for name, conversation in zip(ids, conversations, strict=True):
                _apply(
                    tokenizer, [name], [conversation], add_generation_prompt=add_generation_prompt
                )
        roles = ", ".join(message["role"] for message in conversations[0])
        raise ArtifactError(
            f"{ids[0]}: the tokenizer's chat template refuses the turns {roles}: {error}"
        ) from error
