"""Sources whose dialogues are one text with marked turns, such as "\\n\\nHuman: ...".

Anthropic's comparisons are two dialogues that differ in the last answer: Bai et al. 2022, "Training
a Helpful and Harmless Assistant with Reinforcement Learning from Human Feedback". Other publishers
of the same dialogues store the prompt in a separate column. All use `_dialogue`, so a prompt is the
same in all data sets.
"""

import re

from rlhf_pipeline.data.records import Example, Message
from rlhf_pipeline.data.sources.adapter import MalformedRowError, Row, Source, compared, text, turns

_TURN = re.compile(r"\n\n(Human|Assistant):")
_VICUNA_TURN = re.compile(r"(?:^|\s|</s>)(USER|ASSISTANT):")
_COLUMNS = ("prompt", "chosen", "rejected")


def parse_anthropic(row: Row) -> Example:
    """Prompt: the shared turns. Answers: the last turn of each dialogue."""
    return compared(_dialogue(text(row, "chosen")), _dialogue(text(row, "rejected")))


def _parse_dahoas(row: Row) -> Example:
    """The prompt ends with "\\n\\nAssistant:"; each answer continues it."""
    prompt = text(row, "prompt")
    return compared(*(_dialogue(prompt + text(row, column)) for column in _COLUMNS[1:]))


def _parse_yitingxie(row: Row) -> Example:
    """The dialogues are cut before the last "Assistant:".

    The white space at the cut is not documented, so any is accepted: a prompt may lack the empty
    line before its first turn, and "Assistant:" may end the prompt or begin the answers.
    """
    prompt = text(row, "prompt").strip()
    return compared(
        *(_dialogue(f"\n\n{prompt}\n\n{text(row, column).strip()}") for column in _COLUMNS[1:])
    )


def _parse_vicuna(row: Row) -> Example:
    """Prompt: the turns before the last "ASSISTANT:". Answer: the label, which may end in "</s>".

    The data set has no documentation. By Vicuna's format, white space or "</s>" separates turns,
    and text before the first turn is a system message.
    """
    system, found = turns(text(row, "prompt"), _VICUNA_TURN)
    if not found or found[-1] != Message("assistant", ""):
        raise MalformedRowError("the prompt does not end with 'ASSISTANT:'")
    prompt = tuple(Message(message.role, _without_end(message.content)) for message in found[:-1])
    if system:
        prompt = (Message("system", system), *prompt)
    return Example(prompt, _without_end(text(row, "label")))


def _dialogue(written: str) -> tuple[Message, ...]:
    """Parse "\\n\\nHuman: ...\\n\\nAssistant: ..."; MalformedRowError for any other start."""
    before, found = turns(written, _TURN)
    if before or not found:
        raise MalformedRowError("the dialogue does not start with a turn")
    return found


def _without_end(content: str) -> str:
    return content.strip().removesuffix("</s>").strip()


SOURCES = (
    Source(
        "Anthropic/hh-rlhf", "comparisons",
        "Anthropic's helpful and harmless dialogues, about 161,000 comparisons",
        ("chosen", "rejected"), parse_anthropic,
    ),
    Source(
        "Dahoas/rm-static", "comparisons",
        "Anthropic's dialogues for reward models, about 76,000 comparisons; DeepSpeed-Chat's "
        "default",
        _COLUMNS, _parse_dahoas,
    ),
    Source(
        "Dahoas/full-hh-rlhf", "comparisons",
        "Anthropic's helpful and harmless dialogues, about 112,000 comparisons",
        _COLUMNS, _parse_dahoas,
    ),
    Source(
        "yitingxie/rlhf-reward-datasets", "comparisons",
        "Anthropic's and other English dialogues, about 76,000 comparisons",
        _COLUMNS, _parse_yitingxie,
    ),
    Source(
        "pvduy/sharegpt_alpaca_oa_vicuna_format", "demonstrations",
        "English dialogues of ShareGPT, Alpaca and Open Assistant",
        ("prompt", "label"), _parse_vicuna,
    ),
)  # fmt: skip
