"""HelpSteer2: two answers to each prompt, each rated by people from 0 to 4.

Wang et al. 2024, "HelpSteer2: Open-source dataset for training top-performing reward models". The
two answers to a prompt are consecutive rows. A prompt of several turns has the form
"{user}\\n<extra_id_1>Assistant\\n{answer}\\n<extra_id_1>User\\n{user}".
"""

import re
from dataclasses import dataclass

from rlhf_pipeline.data.records import Example, Message, Unused
from rlhf_pipeline.data.sources.adapter import (
    Records,
    Row,
    Rows,
    Source,
    number,
    outcome,
    preferred,
    text,
    turns,
)

_TURN = re.compile(r"<extra_id_1>(User|Assistant)\n")


@dataclass(frozen=True, slots=True)
class _Answer:
    place: str
    prompt: str
    response: str
    helpfulness: float


def assemble(rows: Rows) -> Records:
    """Choose the more helpful answer of each pair of rows; ties are skipped."""
    first: _Answer | None = None
    for place, row in rows:
        answer = outcome(_answer, place, row)
        if isinstance(answer, Unused):
            yield place, answer
        elif first is None:
            first = answer
        elif first.prompt == answer.prompt:
            yield first.place, outcome(_compared, first, answer)
            first = None
        else:
            yield first.place, Unused("the next row answers another prompt")
            first = answer
    if first is not None:  # `samples` ended between the two rows
        yield first.place, Unused("no row follows", bad=False)


def _answer(place: str, row: Row) -> _Answer:
    return _Answer(place, text(row, "prompt"), text(row, "response"), number(row, "helpfulness"))


def _compared(first: _Answer, second: _Answer) -> Example:
    opening, later = turns(first.prompt, _TURN)
    return preferred(
        (Message("user", opening), *later),
        (first.response, second.response),
        (first.helpfulness, second.helpfulness),
    )


SOURCES = (
    Source(
        name="nvidia/HelpSteer2",
        kind="comparisons",
        description="answers of models rated by people for helpfulness, about 10,000 comparisons "
        "with ties",
        columns=("prompt", "response", "helpfulness"),
        assemble=assemble,
    ),
)
