"""Data sets of the hub: the table `column_maps.toml`, and functions where a map is not enough.

A prompt of Anthropic's dialogues is the same in all data sets that contain them.
"""

import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.split import ColumnMap
from rlhf_pipeline.data.records import Example, Message, Text, Unused
from rlhf_pipeline.data.sources.adapter import (
    Kind,
    MalformedRowError,
    Records,
    Row,
    Rows,
    SkippedRowError,
    Source,
    field,
    messages,
    number,
    outcome,
    preferred,
    question,
    text,
)

_TURN = re.compile(r"\n\n(Human|Assistant):")
_CITATION = re.compile(r" ?\[\d+(?:, ?\d+)*\]")
_CALCULATOR = re.compile(r"<<[^<>]*>>")
_STEERED = re.compile(r"<extra_id_1>(User|Assistant)\n")
_TITLE = re.compile(r" = [^=].* = ?")
_SCORE = "helpfulness"
_TIE = "the two answers have the same score"
_ANSWERS = ("chosen", "rejected")


def compared(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> Example:
    """One comparison from two dialogues that differ in the last answer; else they are malformed."""
    if chosen[-1].role != "assistant" or rejected[-1].role != "assistant":
        raise MalformedRowError("the dialogue does not end with the assistant")
    if chosen[:-1] != rejected[:-1]:
        raise MalformedRowError("the dialogues differ before the last answer")
    return Example(chosen[:-1], chosen[-1].content, rejected[-1].content)


def turns(dialogue: str, marker: re.Pattern[str]) -> tuple[str, tuple[Message, ...]]:
    """Split a dialogue in one string into the text before the first turn, and the turns.

    Texts are stripped. The only group of `marker` is the speaker of the next turn.
    """
    before, *parts = marker.split(dialogue)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    found = [
        Message("assistant" if name == "Assistant" else "user", content.strip())
        for name, content in pairs
    ]
    return before.strip(), tuple(found)


def _rated(first: str, second: str) -> Callable[[Row], Example]:
    """Parse rows of two dialogues with these ratings: `chosen` stays chosen, a tie is skipped."""

    def parse(row: Row) -> Example:
        if number(row, first) == number(row, second):
            raise SkippedRowError(_TIE)
        return compared(*(messages(field(row, each, list), each) for each in _ANSWERS))

    return parse


def _continued(between: str, strip: Callable[[str], str]) -> Callable[[Row], Example]:
    """Parse rows whose dialogue is cut somewhere into a prompt and its two continuations."""

    def parse(row: Row) -> Example:
        prompt = between + strip(text(row, "prompt")) + between
        return compared(*(_dialogue(prompt + strip(text(row, each))) for each in _ANSWERS))

    return parse


def parse_anthropic(row: Row) -> Example:
    """Prompt: the shared turns. Answers: the last turn of each dialogue."""
    return compared(_dialogue(text(row, "chosen")), _dialogue(text(row, "rejected")))


def _dialogue(written: str) -> tuple[Message, ...]:
    """Parse "\\n\\nHuman: ...\\n\\nAssistant: ..."; any other start is malformed."""
    before, found = turns(written, _TURN)
    if before or not found:
        raise MalformedRowError("the dialogue does not start with a turn")
    return found


def parse_webgpt(row: Row) -> Example:
    """Citations by number are removed: a model without a browser must not learn them."""
    return preferred(
        question(text(field(row, "question", dict), "full_text")),
        (_CITATION.sub("", text(row, "answer_0")), _CITATION.sub("", text(row, "answer_1"))),
        (number(row, "score_0"), number(row, "score_1")),
    )


def _parse_shp(row: Row) -> Example:
    """`labels` is 1 if A is preferred, 0 if B is."""
    label = number(row, "labels")
    if label not in (0, 1):
        raise MalformedRowError("column 'labels' is neither 0 nor 1")
    answers = (text(row, "human_ref_A"), text(row, "human_ref_B"))
    return preferred(question(text(row, "history")), answers, (label, 1 - label))


def _parse_orca(row: Row) -> Example:
    """`status` is "tie" for equal ratings."""
    if text(row, "status") == "tie":
        raise SkippedRowError(_TIE)
    system, prompt = text(row, "system"), question(text(row, "input"))
    prompt = (Message("system", system), *prompt) if system.strip() else prompt
    return Example(prompt, text(row, "chosen"), text(row, "rejected"))


def _parse_gsm8k(row: Row) -> Example:
    """Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems".

    The solution ends with the line "#### 1,234". Marks such as <<48/2=24>> call a calculator.
    """
    solution = _CALCULATOR.sub("", text(row, "answer")).strip()
    result = solution.rpartition("####")[2].strip().replace(",", "")
    if not result or "####" not in solution:
        raise MalformedRowError("the answer has no result after ####")
    return Example(question(text(row, "question")), solution, reference=result)


def _pairs(rows: Rows) -> Records:
    """HelpSteer2: choose the more helpful answer of each pair of rows; ties are skipped.

    Wang et al. 2024, "HelpSteer2: Open-source dataset for training top-performing reward models".
    The two answers to a prompt are consecutive rows. A prompt of several turns has the form
    "{user}\\n<extra_id_1>Assistant\\n{answer}\\n<extra_id_1>User\\n{user}".
    """
    first: tuple[str, Row] | None = None
    for place, row in rows:
        rated = outcome(_scored_answer, row)
        if isinstance(rated, Unused):
            yield place, rated
        elif first is None:
            first = place, rated
        elif first[1]["prompt"] == rated["prompt"]:
            opening, later = turns(rated["prompt"], _STEERED)
            both = first[1], rated
            answers, scores = (tuple(one[key] for one in both) for key in ("response", _SCORE))
            yield first[0], outcome(preferred, (Message("user", opening), *later), answers, scores)
            first = None
        else:
            yield first[0], Unused("the next row answers another prompt")
            first = place, rated
    if first is not None:  # `samples` ended between the two rows
        yield first[0], Unused("no row follows", bad=False)


def _scored_answer(row: Row) -> Row:
    said = {column: text(row, column) for column in ("prompt", "response")}
    return said | {_SCORE: number(row, _SCORE)}


def _articles(rows: Rows) -> Records:
    """WikiText: yield each article as one text, without blank lines.

    Merity et al. 2016, "Pointer Sentinel Mixture Models". A row is a line: a paragraph, an empty
    line, or a heading with one equals sign per level on each side. A text file is one row of many.
    """
    start, article = "", list[str]()
    for place, row in rows:
        written = outcome(lambda row: text(row, "text"), row)
        if isinstance(written, Unused):
            yield place, written
            continue
        for line in filter(str.strip, written.split("\n")):
            if article and _TITLE.fullmatch(line):
                yield start, Text("\n".join(article))
                article = []
            start = start if article else place
            article.append(line.strip())
    if article:
        yield start, Text("\n".join(article))


_FUNCTIONS: dict[str, dict[str, Any]] = {
    "Anthropic/hh-rlhf": {"parse": parse_anthropic},
    "Dahoas/rm-static": {"parse": _continued("", str)},
    "Dahoas/full-hh-rlhf": {"parse": _continued("", str)},
    # The white space where the dialogues are cut is not documented, so any is accepted: a prompt
    # may lack the empty line before its first turn, and "Assistant:" may end the prompt or begin
    # the answers.
    "yitingxie/rlhf-reward-datasets": {"parse": _continued("\n\n", str.strip)},
    "openai/webgpt_comparisons": {"parse": parse_webgpt},
    "stanfordnlp/SHP": {"parse": _parse_shp},
    "argilla/distilabel-intel-orca-dpo-pairs": {"parse": _parse_orca},
    "openai/gsm8k": {"parse": _parse_gsm8k},
    "nvidia/HelpSteer2": {"assemble": _pairs},
    "Salesforce/wikitext": {"assemble": _articles},
}
"""What makes records of the sources whose `columns` are no map."""


_TABLE: dict[Any, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)


def _source(kind: Kind, name: str, columns: Any, ratings: Sequence[str] = (), **hub: Any) -> Source:
    read = ColumnMap(**columns) if isinstance(columns, dict) else (*columns, *ratings)
    functions = {"parse": _rated(*ratings)} if ratings else _FUNCTIONS.get(name, {})
    return Source(name, kind, columns=read, **functions, **hub)


SOURCES = tuple(
    _source(kind, name, **row) for kind, rows in _TABLE.items() for name, row in rows.items()
)
