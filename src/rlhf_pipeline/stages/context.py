"""The decisions of one `kedro run` that all its stages share."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ConfigError, suggestion
from rlhf_pipeline.stages.events import StageListener
from rlhf_pipeline.stages.stored import StoredStages


@dataclass(frozen=True)
class RunContext:
    """One `kedro run`, or one `kedro rlhf status`."""

    workspace: Path
    """Folder of all work directories."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    forced: frozenset[str] = frozenset()
    """Stages that run again even if they are finished: the parameter `force`."""
    trust_remote_code: bool = False
    """Whether Python code that ships with a model may run: `base_model.trust_remote_code`."""
    mixture: Mapping[str, list[str]] = field(default_factory=dict)
    """Published inputs of the run that other parameters made, with the changes: the parameter
    `inputs` accepts them."""
    listener: StageListener = field(default_factory=StageListener)
    """Follows every stage."""
    stored: StoredStages | None = None
    """The copies in a store; it is also a listener."""


def forced_stages(value: Any, known: Collection[str]) -> frozenset[str]:
    """The stages to force: true for all, a list of names, or names separated by blanks.

    Raises ConfigError if a name is unknown, or the value is of another type.
    """
    if value is None or isinstance(value, bool):
        return frozenset(known if value else ())
    names = value.split() if isinstance(value, str) else value
    if not isinstance(names, list):
        raise ConfigError(f"force: found {value!r}, expected true, a stage, or a list of stages")
    for name in names:
        if name not in known:
            raise ConfigError(
                f"force: no stage {name!r}{suggestion(str(name), known)}; "
                f"the stages are {', '.join(known)}"
            )
    return frozenset(names)
