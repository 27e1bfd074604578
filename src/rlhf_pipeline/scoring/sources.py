"""Functions that score, most often one of the user, which each rank calls once per rollout:

    def reward(prompts: list[list[dict[str, str]]], responses: list[str]) -> list[float]

`prompts` are messages ({"role": ..., "content": ...}). `responses` are texts without special tokens
and without surrounding white space. A parameter `references` gets the true answers, one for each
row; `scored` gets the tokens, a `Scored`; any other one the column of its name that the sources
carry (`columns.extra`). With `CallableReward.processes`, processes of the rank call it with one row
at a time.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import regex

from rlhf_pipeline.config.rewards import CallableReward, CodeReward, check_signature
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime import heartbeat, sandbox
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.user_code import loaded
from rlhf_pipeline.scoring.answers import Answered
from rlhf_pipeline.scoring.function_workers import Call, Workers, scores

if TYPE_CHECKING:
    from rlhf_pipeline.generation.records import Scored

FAULTS = tuple(each for each in get_args(sandbox.Outcome) if each != "passed")
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class FunctionSource:
    """A Python function of the user as a source of scores."""

    place: str  # the function as written in the parameters, for messages
    function: Callable[..., Any]
    workers: Workers | None = None  # None: the function is called in this process

    def __post_init__(self) -> None:
        # The dry run knows what the sources carry, and that processes get no tokens.
        check_signature(self.place, self._signature, {"the split": self._signature.parameters})

    @classmethod
    def load(
        cls, reward: CallableReward, function: Callable[..., Any], job: LaunchedJob, name: str
    ) -> "FunctionSource":
        """The function with its processes, which import it themselves."""
        source = cls(reward.callable, function)
        if not reward.processes:
            return source
        target = reward.callable, _location(reward, job, name), reward.function
        return replace(source, workers=Workers(*target, reward.processes, reward.timeout_s))

    def __call__(self, scored: "Scored", answered: Answered) -> list[float]:
        """Call the function.

        Raises ConfigError if the prompts lack a column that it asks for, and StageError if a true
        answer is missing, or it does not return one finite number per response.
        """
        parameters = self._signature.parameters
        check_signature(self.place, self._signature, {"the split": answered.columns})
        offered: dict[str, Any] = {**answered.columns, "scored": scored}
        if "references" in parameters:
            offered["references"] = answered.true_answers(self.place)
        further = [name for name in [*parameters][2:] if name in offered]  # two get the texts
        # The function may empty its lists.
        call = Call(
            [*answered.prompts], [*answered.responses], {name: offered[name] for name in further}
        )
        if self.workers is None:
            return scores(self.place, self.function, call)
        return self.workers([call.row(row) for row in range(len(call.responses))])

    @property
    def apart(self) -> str | None:
        reads_more = self.workers is None or "scored" in self._signature.parameters
        return None if reads_more else "processes"

    @property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.function)


def program_of(response: str) -> str:
    """The last fenced block of a response, which may lack its end; without one the response."""
    return (_FENCED.findall(response) or [response])[-1]


@dataclass(frozen=True)
class CodeSource:
    """Programs that pass their tests as a source of rewards; each rank runs those of its rows."""

    reward: CodeReward
    place: str  # its parameters, for messages
    counts: Counter[str] = field(default_factory=Counter)  # of programs that do not pass
    apart: ClassVar = "processes"

    def __post_init__(self) -> None:
        """Raises StageError if the machine does not offer the sandbox."""
        sandbox.check(self.reward.timeout_s, self.reward.memory_mib)

    def __call__(self, scored: "Scored", answered: Answered) -> list[float]:
        """1 for each program that passes the tests in its true answer, else 0.

        Raises StageError if a true answer is missing or is no Python, or the sandbox fails.
        """
        tests = answered.true_answers(self.place)
        for prompt, text in zip(answered.prompts, tests, strict=True):
            try:
                compile(text, "<tests>", "exec")
            except (SyntaxError, ValueError) as error:
                raise StageError(
                    f"{self.place}: found the true answer {text!r} of the prompt {prompt}, "
                    f"expected tests in Python: {error}"
                ) from None
        limits = self.reward.model_dump(include={"timeout_s", "memory_mib"})
        run, scores = partial(sandbox.run, **limits), []
        with ThreadPoolExecutor(self.reward.processes) as pool:
            for outcome in pool.map(run, map(program_of, answered.responses), tests):
                heartbeat.report_progress()
                if outcome != "passed":
                    self.counts[outcome] += 1
                scores.append(float(outcome == "passed"))
        return scores

    def counted(self) -> dict[str, int]:
        """Programs that did not pass since the last call, by `FAULTS`."""
        return {fault: self.counts.pop(fault, 0) for fault in FAULTS}


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
