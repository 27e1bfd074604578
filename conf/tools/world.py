"""Small worlds with a known best policy, to try tools and environments out (docs/tools.md)."""

import ast
import operator
import random
from collections.abc import Callable, Mapping
from typing import Any

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def calculate(expression: str) -> str:
    """Compute with whole numbers.

    Args:
        expression: Whole numbers with +, - and *, such as 17 * 23 + 4.
    """

    def value(node: ast.AST) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=one):
                return -value(one)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
        raise ValueError(f"found {ast.unparse(node)}, expected whole numbers with +, - and *")

    return str(value(ast.parse(expression[:200].strip(), mode="eval").body))


class Guess:
    """An environment: a hidden number from 1 to 50, to be found in at most six guesses.

    It answers each guess by "higher" or "lower". Halving the rest finds any number in time. The
    reward is 1 for the number, else 0.
    """

    guesses, largest = 6, 50

    def __init__(self, seed: int) -> None:
        self._hidden = random.Random(seed).randint(1, self.largest)
        self._left = self.guesses

    def reset(self, task: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return the messages of the task."""
        return list(task["messages"])

    def step(self, answer: str) -> tuple[list[dict[str, str]], float, bool]:
        """Judge a guess: the last word of the answer."""
        self._left -= 1
        word = (answer.split() or [""])[-1].strip(".")
        guess = int(word) if word.isdecimal() and len(word) < 6 else None
        if guess == self._hidden or self._left == 0:
            return [], float(guess == self._hidden), True
        said = "a number, please"
        if guess is not None:
            said = "higher" if guess < self._hidden else "lower"
        return [{"role": "user", "content": said}], 0.0, False
