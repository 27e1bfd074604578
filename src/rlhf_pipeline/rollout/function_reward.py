"""Scores from a Python function of the user.

Each rank calls the function once per rollout, with the rows of that rank:

    def reward(prompts: list[list[dict[str, str]]], responses: list[str]) -> list[float]

`prompts` are messages ({"role": ..., "content": ...}). `responses` are texts without special tokens
and without surrounding white space. A function with a parameter `references` also gets the true
answers, one for each row; one with a parameter `scored` gets the tokens, a `Scored`. Any other
parameter gets the column of its name that the sources carry (`columns.extra`).

With `CallableReward.processes`, processes of the rank call it with one row at a time.
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import regex
import torch
from torch import Tensor

from rlhf_pipeline.config.rewards import CallableReward, check_isolated, check_signature
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.rollout.function_workers import (
    Call,
    Workers,
    described,
    imported,
    number,
    results,
)
from rlhf_pipeline.rollout.records import Answered, Scored
from rlhf_pipeline.runtime.job import LaunchedJob


@dataclass(frozen=True)
class FunctionSource:
    """A Python function of the user as a source of rewards."""

    place: str  # the function as written in the parameters, for messages
    function: Callable[..., Any]
    reads_texts: bool = True
    workers: Workers | None = None  # None: the function is called in this process

    def __post_init__(self) -> None:
        signature = inspect.signature(self.function)  # `checks` knows what the sources carry
        check_signature(self.place, signature, {"the split": signature.parameters})

    @classmethod
    def load(
        cls,
        reward: CallableReward,
        job: LaunchedJob,
        name: str,
        function: Callable[..., Any] | None = None,
    ) -> "FunctionSource":
        """The function, imported unless it is at hand, with its processes.

        Raises the errors of `check_isolated` and `import_function`.
        """
        source = cls(reward.callable, function or import_function(reward, job, name))
        check_isolated(reward, source._asked)
        if not reward.processes:
            return source
        target = reward.callable, _location(reward, job, name), reward.function
        return replace(source, workers=Workers(*target, reward.processes, reward.timeout_s))

    def __call__(self, scored: Scored, answered: Answered) -> Tensor:
        """Call the function.

        Raises ConfigError if the prompts lack a column that it asks for, and StageError if a true
        answer that it reads is missing, if it fails or does not return one result per response, or
        if a result is not a finite number.
        """
        given = {"the split": answered.columns}
        check_signature(self.place, inspect.signature(self.function), given)
        if "references" in self._asked:
            require_references(self.place, answered)
        if self.workers is not None:
            rows = (answered.row(row) for row in range(len(answered.responses)))
            return torch.tensor(self.workers([self._call(row, scored) for row in rows]))
        try:
            found = results(self.function, self._call(answered, scored))
        except Exception as error:
            where = self._where(answered, scored)
            raise StageError(f"{self.place} failed {where}: {described(error)}") from error
        if len(found) != len(answered.responses):
            raise StageError(
                f"{self.place}: found {len(found)} results, expected "
                f"{len(answered.responses)}, one for each response. The first prompt is "
                f"{answered.prompts[0]}"
            )
        return torch.tensor(
            [self._number(result, answered, row) for row, result in enumerate(found)]
        )

    def _call(self, answered: Answered, scored: Scored) -> Call:
        own: dict[str, Any] = {"references": answered.references, "scored": scored}
        offered, further = answered.columns | own, [*self._asked][2:]  # two get the texts
        more = {name: value for name, value in offered.items() if name in further}
        return Call(answered.prompts, answered.responses, more)

    @property
    def _asked(self) -> Collection[str]:
        return inspect.signature(self.function).parameters

    def _number(self, result: Any, answered: Answered, row: int) -> float:
        found = number(result)
        if isinstance(found, str):
            raise StageError(
                f"{self.place}: found {found}, expected a finite number, for the response "
                f"{answered.responses[row]!r} to the prompt {answered.prompts[row]}"
            )
        return found

    def _where(self, answered: Answered, scored: Scored) -> str:
        """The first row on which the function also fails alone, for the message."""
        for row in range(0 if "scored" in self._asked else len(answered.prompts)):
            one = answered.row(row)
            try:
                results(self.function, self._call(one, scored))
            except Exception:  # the user's function may raise anything
                return f"at the response {one.responses[0]!r} to the prompt {one.prompts[0]}"
        return (
            f"at {len(answered.prompts)} responses together, the first to the prompt "
            f"{answered.prompts[0]}"
        )


def require_references(place: str, answered: Answered) -> None:
    """Raise StageError if a true answer is missing: right answers would count as wrong ones."""
    if missing := answered.references.count(None):
        raise StageError(
            f"{place}: found {missing} of {len(answered.references)} prompts without a true "
            "answer, expected one for each. Fix: set split.without_reference to drop"
        )


def matches(pattern: str, limit_s: float = 5.0) -> FunctionSource:
    """1 for a response in which a regular expression is found, else 0. A search of a response that
    takes longer than the limit, because the pattern backtracks, fails like a function."""
    search = partial(regex.compile(pattern).search, timeout=limit_s)
    return FunctionSource(
        f"regex {pattern!r}",
        lambda prompts, responses: [search(each) is not None for each in responses],
    )


def import_function(reward: CallableReward, job: LaunchedJob, name: str) -> Callable[..., Any]:
    """Import the function from a file, which is the input `name`, or from an installed module.

    Raises StageError if it cannot be imported or is not a function, and ArtifactError if the file
    has changed since the stage was planned.
    """
    try:
        function = imported(_location(reward, job, name), reward.function)
    except Exception as error:
        raise StageError(
            f"{reward.callable} cannot be imported: {type(error).__name__}: {error}. "
            "Fix: correct it; add the folders of its modules to PYTHONPATH, also the working folder"
        ) from error
    job.expect_unchanged(name, job.inputs[name])
    if not callable(function):
        raise StageError(f"{reward.callable} is {function!r}, not a function")
    return function


def _location(reward: CallableReward, job: LaunchedJob, name: str) -> str:
    """The file of the plan, or the module."""
    return str(job.inputs[name]) if reward.location.endswith(".py") else reward.location
