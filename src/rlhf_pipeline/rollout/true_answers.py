"""Whether a response agrees with the true answer of its prompt, for rewards and judges."""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal

from rlhf_pipeline.rollout.mathematics import same_mathematics
from rlhf_pipeline.text_statistics import FINAL, final_answer

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def last_number(text: str) -> Decimal | None:
    """The last number of a text, without separators of thousands: "1,234.50" is 1234.5."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def _normal(text: str) -> str:
    """Text without differences in case and white space, and without a final full stop."""
    return " ".join(text.casefold().split()).removesuffix(".")


def _same_last_number(true: str, given: str) -> bool:
    return (number := last_number(given)) is not None and number == last_number(true)


AGREES: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda true, given: _normal(true) == _normal(given),
    "final_answer": lambda true, given: _normal(final_answer(true)) == _normal(final_answer(given)),
    "contains": lambda true, given: _normal(true) in _normal(given),
    "last_number": _same_last_number,
    "math": lambda true, given: same_mathematics(_as_tex(true), _as_tex(given)),
}
"""Whether an answer (second) agrees with the true one (first), by `ReferenceReward.reference`."""


_WORD = re.compile(r"\s[A-Za-z]{2,}|[A-Za-z]{2,}\s")
_COMMAND = re.compile(r"\\[A-Za-z]+(?:\{[A-Za-z .]*\})?")
_TEX_THOUSANDS = re.compile(r"(?<=\d)(?:\\,|,\\!|\{,\})(?=\d{3})")


def _as_tex(text: str) -> str:
    """A text as math-verify reads it: a result without TeX's marks gets them, prose does not."""
    last = _TEX_THOUSANDS.sub("", text).rpartition("####")[2]
    if re.search(r"\$|\\[(\[]|\\boxed", last):
        return last
    result = FINAL.split(last)[-1].strip(" \t\n*_`.")
    return result if _WORD.search(_COMMAND.sub("", result)) else f"${result}$"


def accuracy(true: str | None, given: str) -> tuple[float, float] | None:
    """Whether an answer is right, 1 or 0: (strict, lenient); None without a true answer.

    strict: its final answer is that of the true answer (`final_answer`). lenient: its last number
    is that of the true answer, if that one is a number, else it contains the true answer.
    """
    if true is None:
        return None
    right = final_answer(true)
    lenient = AGREES["last_number" if _NUMBER.fullmatch(right) else "contains"]
    return float(AGREES["final_answer"](true, given)), float(lenient(right, given))


def agreement(kind: str) -> Callable[..., list[float]]:
    """The reward function of a kind of agreement: 1 for a response that agrees, else 0."""
    agrees = AGREES[kind]

    def reward(
        prompts: Sequence[object], responses: Sequence[str], references: Sequence[str]
    ) -> list[float]:
        return [float(agrees(*pair)) for pair in zip(references, responses, strict=True)]

    return reward
