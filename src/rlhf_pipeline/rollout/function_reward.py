"""Scores from a Python function of the user.

Each rank calls the function once per rollout, with the rows of that rank:

    def reward(prompts: list[list[dict[str, str]]], responses: list[str]) -> list[float]

`prompts` are messages ({"role": ..., "content": ...}). `responses` are texts without special tokens
and without surrounding white space. A function with a parameter `references` also gets the true
answers, one for each row; one with a parameter `scored` gets the tokens, a `Scored`. Any other
parameter gets the column of its name that the sources carry (`columns.extra`).
"""

import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import regex
import torch
from torch import Tensor

from rlhf_pipeline.config.reward_files import check_signature
from rlhf_pipeline.config.rewards import CallableReward
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.rollout.records import Answered, Scored
from rlhf_pipeline.runtime.job import LaunchedJob


@dataclass(frozen=True)
class FunctionSource:
    """A Python function of the user as a source of rewards."""

    place: str  # the function as written in the parameters, for messages
    function: Callable[..., Any]
    reads_texts: bool = True

    def __post_init__(self) -> None:
        signature = inspect.signature(self.function)  # `checks` knows what the sources carry
        check_signature(self.place, signature, {"the split": signature.parameters})

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
        try:
            results = self._call(answered, scored)
        except Exception as error:
            where = self._where(answered, scored)
            raise StageError(
                f"{self.place} failed {where}: {type(error).__name__}: {error}{_line(error)}"
            ) from error
        if len(results) != len(answered.responses):
            raise StageError(
                f"{self.place}: found {len(results)} results, expected "
                f"{len(answered.responses)}, one for each response. The first prompt is "
                f"{answered.prompts[0]}"
            )
        return torch.tensor(
            [self._number(result, answered, row) for row, result in enumerate(results)]
        )

    def _call(self, answered: Answered, scored: Scored) -> list[Any]:
        offered = answered.columns | {"references": answered.references, "scored": scored}
        further = list(self._asked)[2:]  # the first two get prompts and responses
        more = {name: value for name, value in offered.items() if name in further}
        return list(self.function(answered.prompts, answered.responses, **more))

    @property
    def _asked(self) -> Collection[str]:
        return inspect.signature(self.function).parameters

    def _number(self, result: Any, answered: Answered, row: int) -> float:
        try:
            number = math.nan if isinstance(result, str | bytes) else float(result)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise StageError(
                f"{self.place}: found {result!r}, expected a finite number, for the response "
                f"{answered.responses[row]!r} to the prompt {answered.prompts[row]}"
            )
        return number

    def _where(self, answered: Answered, scored: Scored) -> str:
        """The first row on which the function also fails alone, for the message."""
        for row in range(0 if "scored" in self._asked else len(answered.prompts)):
            one = answered.row(row)
            try:
                self._call(one, scored)
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


def _line(error: Exception) -> str:
    """The place of an error of a reward function: the innermost one outside of libraries."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)[2:]
        if not frame.filename.startswith(("<", sys.prefix, sys.base_prefix))
    ]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def import_function(reward: CallableReward, job: LaunchedJob, name: str) -> Callable[..., Any]:
    """Import the function from a file, which is the input `name`, or from an installed module.

    Raises StageError if it cannot be imported or is not a function, and ArtifactError if the file
    has changed since the stage was planned.
    """
    try:
        is_file = reward.location.endswith(".py")
        module = (
            _run_file(job.inputs[name]) if is_file else importlib.import_module(reward.location)
        )
        function = getattr(module, reward.function)
    except Exception as error:
        raise StageError(
            f"{reward.callable} cannot be imported: {type(error).__name__}: {error}. "
            "Fix: correct it; add the folders of its modules to PYTHONPATH, also the working folder"
        ) from error
    job.expect_unchanged(name, job.inputs[name])
    if not callable(function):
        raise StageError(f"{reward.callable} is {function!r}, not a function")
    return function


def _run_file(path: Path) -> ModuleType:
    name = f"ppo_rewards_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "preflight rejects files that are not .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module
