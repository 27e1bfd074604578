"""Scores from a Python function of the user, which each rank calls once per rollout:

    def reward(prompts: list[list[dict[str, str]]], responses: list[str]) -> list[float]

`prompts` are messages ({"role": ..., "content": ...}). `responses` are texts without special tokens
and without surrounding white space. A parameter `references` gets the true answers, one for each
row; `scored` gets the tokens, a `Scored`; any other one the column of its name that the sources
carry (`columns.extra`). With `CallableReward.processes`, processes of the rank call it with one row
at a time.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import regex
import torch
from torch import Tensor

from rlhf_pipeline.config.rewards import CallableReward, check_signature
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.generation.records import Answered, Scored
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.scoring.function_workers import Call, Workers, loaded, scores


@dataclass(frozen=True)
class FunctionSource:
    """A Python function of the user as a source of rewards."""

    place: str  # the function as written in the parameters, for messages
    function: Callable[..., Any]
    workers: Workers | None = None  # None: the function is called in this process

    def __post_init__(self) -> None:
        # The dry run knows what the sources carry, and that processes get no tokens.
        check_signature(self.place, self._signature, {"the split": self._signature.parameters})

    @classmethod
    def load(
        cls,
        reward: CallableReward,
        job: LaunchedJob,
        name: str,
        function: Callable[..., Any] | None = None,
    ) -> "FunctionSource":
        """The function, imported unless it is at hand, with its processes."""
        source = cls(reward.callable, function or import_function(reward, job, name))
        if not reward.processes:
            return source
        target = reward.callable, _location(reward, job, name), reward.function
        return replace(source, workers=Workers(*target, reward.processes, reward.timeout_s))

    def __call__(self, scored: Scored, answered: Answered) -> Tensor:
        """Call the function.

        Raises ConfigError if the prompts lack a column that it asks for, and StageError if a true
        answer is missing, or it does not return one finite number per response.
        """
        check_signature(self.place, self._signature, {"the split": answered.columns})
        if "references" in self._signature.parameters:
            require_references(self.place, answered)
        call = self._call(answered, scored)
        if self.workers is None:
            return torch.tensor(scores(self.place, self.function, call))
        return torch.tensor(self.workers([call.row(row) for row in range(len(call.responses))]))

    @property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    def _call(self, answered: Answered, scored: Scored) -> Call:
        own: dict[str, Any] = {"references": answered.references, "scored": scored}
        further = [*self._signature.parameters][2:]  # two get the texts
        more = {name: value for name, value in (answered.columns | own).items() if name in further}
        return Call([*answered.prompts], [*answered.responses], more)  # it may empty them


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
    name = f"regex {pattern!r}"
    return FunctionSource(name, lambda prompts, responses: [bool(search(r)) for r in responses])


def import_function(reward: CallableReward, job: LaunchedJob, name: str) -> Callable[..., Any]:
    """Import the function from a file, which is the input `name`, or from an installed module.

    Raises StageError if it cannot be imported or is not a function, and ArtifactError if the file
    has changed since the stage was planned.
    """
    function = loaded(reward.callable, _location(reward, job, name), reward.function)
    job.expect_unchanged(name, job.inputs[name])
    return function


def _location(reward: CallableReward, job: LaunchedJob, name: str) -> str:
    """The file of the plan, or the module."""
    return str(job.inputs[name]) if reward.location.endswith(".py") else reward.location
