"""Answers over several turns, with tools or in an environment (docs/tools.md)."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from rlhf_pipeline.config.block import Block, operational
from rlhf_pipeline.config.doors import CODE, ENVIRONMENT, source_file
from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.errors import ConfigError

CODE_PREFIX = "code."
"""Inputs of a stage: the source file of `grpo.tools.0` is `code.tools.0`."""


class EpisodesConfig(Block):
    """How a policy answers over several turns. Without tools and environment, it has one turn."""

    tools: tuple[str, ...] = ()
    """Python functions that the policy may call: `FILE.py:FUNCTION` or `PACKAGE.MODULE:FUNCTION`,
    with type hints and a docstring that describes each argument. The model's chat template must
    know tools."""
    environment: str | None = None
    """What answers the policy: `FILE.py:CLASS`, `PACKAGE.MODULE:CLASS`, or the name of an installed
    one, such as verifiers and openenv. None: a turn without a call is the last one."""
    environment_arguments: dict[str, Any] = Field(default={})
    """Arguments of the environment: each for a parameter of its name, and all of them for a
    parameter `environment_arguments`."""
    max_turns: PositiveInt = 8
    """Largest number of turns of the policy. An episode that has not ended by then counts as
    cut."""
    max_turn_tokens: PositiveInt | None = None
    """Largest number of tokens of a turn, and of a reply to it. None:
    `sampling.max_response_tokens`, the limit of all turns and replies together."""
    max_prompt_tokens: PositiveInt = 1024
    """Largest number of tokens of an episode's prompt, with the descriptions of the tools."""
    tool_timeout_s: PositiveFloat = operational(30.0)
    """Longest call of a tool, or step of an environment, in seconds."""
    tool_processes: PositiveInt = operational(16)
    """Calls that each rank waits for at the same time."""
    max_failed_calls: float = Field(default=0.9, ge=0, le=1)
    """Largest share of a rollout's calls that may fail before the stage ends: by exceptions, over
    the time limit, or by the end of their process. A malformed call, or one of an unknown tool, is
    the policy's own fault: it is counted apart, and ends nothing."""
    repeat: Literal["check"] | None = operational(None)
    """check: give one of eight episodes' turns to tools and environment once more, and end the
    stage if they reply differently. None: they may depend on time, network and chance."""

    @field_validator("tools")
    @classmethod
    def _functions(cls, tools: tuple[str, ...]) -> tuple[str, ...]:
        names = [tool.rpartition(":")[2] for tool in tools]
        for tool, name in zip(tools, names, strict=True):
            if not CODE.fullmatch(tool):
                raise ValueError(f"found {tool!r}, expected FILE.py:FUNCTION or MODULE:FUNCTION")
            if names.count(name) > 1:
                raise ValueError(f"found two functions {name!r}. Fix: rename one of them")
        return tools

    @field_validator("environment")
    @classmethod
    def _class(cls, name: str | None) -> str | None:
        if name is None or ":" in name:
            return cls._functions((name,))[0] if name else None
        try:
            return ENVIRONMENT.place(name)
        except ConfigError as error:
            raise ValueError(error.message) from None

    @property
    def has_turns(self) -> bool:
        """Whether an answer can have several turns."""
        return bool(self.tools or self.environment)

    def longest_prompt(self, sampling: SamplingConfig) -> int:
        """The tokens before the response, and those of a turn that is sampled beyond its limit."""
        return self.max_prompt_tokens + (self.max_turn_tokens or sampling.max_response_tokens)

    @property
    def episodes(self) -> "EpisodesConfig":
        """The fields of this block alone."""
        return EpisodesConfig(**{name: getattr(self, name) for name in EpisodesConfig.model_fields})

    def code(self) -> dict[str, str]:
        """The places of tools and environment, by parameter."""
        found = {f"tools.{index}": tool for index, tool in enumerate(self.tools)}
        return found | ({"environment": self.environment} if self.environment else {})

    def code_inputs(self) -> dict[str, Path]:
        """Inputs of the stage: the source files of tools and environment; ConfigError if there is
        none."""
        return {f"{CODE_PREFIX}{name}": source_file(place) for name, place in self.code().items()}
