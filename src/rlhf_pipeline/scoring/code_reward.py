"""Scores from tests: the program in a response runs in a sandbox with the tests of its prompt."""

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, get_args

from rlhf_pipeline.config.rewards import CodeReward
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime import heartbeat, sandbox
from rlhf_pipeline.scoring.answers import Answered

if TYPE_CHECKING:
    from rlhf_pipeline.generation.records import Scored

FAULTS = tuple(each for each in get_args(sandbox.Outcome) if each != "passed")
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def program_of(response: str) -> str:
    """The last fenced block of a response, which may lack its end; without one the response."""
    return (_FENCED.findall(response) or [response])[-1]


@dataclass(frozen=True)
class CodeSource:
    """Programs that pass their tests as a source of rewards; each rank runs those of its rows."""

    reward: CodeReward
    place: str  # its parameters, for messages
    counts: Counter[str] = field(default_factory=Counter)  # of programs that do not pass

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
                heartbeat.tick()
                if outcome != "passed":
                    self.counts[outcome] += 1
                scores.append(float(outcome == "passed"))
        return scores

    def counted(self) -> dict[str, int]:
        """Programs that did not pass since the last call, by `FAULTS`."""
        return {fault: self.counts.pop(fault, 0) for fault in FAULTS}
