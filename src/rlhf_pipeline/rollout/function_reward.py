"""Scores from a Python function of the user.

Each rank calls the function once per rollout, with the rows of that rank:

    def reward(prompts: list[list[dict[str, str]]], responses: list[str]) -> list[float]

`prompts` are messages ({"role": ..., "content": ...}). `responses` are texts without special tokens
and without surrounding white space. A function with a parameter `references` also gets the true
answers, one for each row.
"""

import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlhf_pipeline.config.reward_files import check_signature
from rlhf_pipeline.config.rewards import CallableReward
from rlhf_pipeline.data.records import Conversation
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
        check_signature(self.place, inspect.signature(self.function))

    def __call__(self, _: Scored, answered: Answered) -> Tensor:
        """Call the function.

        Raises StageError if a true answer that the function reads is missing, if the function fails
        or does not return one result per response, or if a result is not a finite number.
        """
        reads_references = "references" in inspect.signature(self.function).parameters
        missing = answered.references.count(None) if reads_references else 0
        if missing:  # it would take right answers for wrong ones
            raise StageError(
                f"{self.place}: found {missing} of {len(answered.references)} prompts without a "
                "true answer, expected one for each. Fix: set split.without_reference to drop"
            )
        rows = list(zip(answered.prompts, answered.responses, answered.references, strict=True))

        def call(rows: Sequence[tuple[Conversation, str, str | None]]) -> list[Any]:
            prompts, responses, references = (list(column) for column in zip(*rows, strict=True))
            more = {"references": references} if reads_references else {}
            return list(self.function(prompts, responses, **more))

        try:
            results = call(rows)
        except Exception as error:
            where = f"at {len(rows)} responses together, the first to the prompt {rows[0][0]}"
            for row in rows:  # the first one on which the function also fails alone
                try:
                    call([row])
                except Exception:  # the user's function may raise anything
                    where = f"at the response {row[1]!r} to the prompt {row[0]}"
                    break
            raise StageError(
                f"{self.place} failed {where}: {type(error).__name__}: {error}{_line(error)}"
            ) from error
        if len(results) != len(rows):
            raise StageError(
                f"{self.place}: found {len(results)} results, expected {len(rows)}, one for each "
                f"response. The first prompt is {rows[0][0]}"
            )
        for result, (prompt, response, _reference) in zip(results, rows, strict=True):
            if not math.isfinite(_number(result)):
                raise StageError(
                    f"{self.place}: found {result!r}, expected a finite number, for the response "
                    f"{response!r} to the prompt {prompt}"
                )
        return torch.tensor([_number(result) for result in results])


def _number(result: Any) -> float:
    """A result as a number; NaN if it is none."""
    try:
        return math.nan if isinstance(result, str | bytes) else float(result)
    except (TypeError, ValueError, OverflowError):
        return math.nan


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
