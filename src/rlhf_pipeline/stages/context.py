"""The decisions of one `kedro run` that all its stages share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.stages.events import Listeners, StageListener


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
    listener: StageListener = field(default_factory=Listeners)
    """Follows every stage."""
