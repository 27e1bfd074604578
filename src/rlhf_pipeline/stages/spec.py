"""Everything that the driver knows about a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlhf_pipeline.config.block import Block

TRAINING_LIBRARIES = ("torch", "deepspeed", "transformers", "tokenizers", "numpy", "peft")


@dataclass(frozen=True)
class StageSpec:
    """One stage. `stage_registry` lists the stages of the project."""

    name: str
    """Name of the stage, its node, its work directory and, for most stages, its parameter block."""
    program: str
    """Name of the module to launch."""
    distributed: bool = True
    """True: the `deepspeed` launcher starts it on every rank. False: one plain Python process."""
    libraries: tuple[str, ...] = TRAINING_LIBRARIES
    """Libraries whose version can change the result; part of the fingerprint."""
    blocks: Mapping[str, type[Block]] = field(default_factory=dict)
    """Top-level parameter blocks that the stage introduces, by name."""
    batch_sizes: tuple[str, ...] = ()
    """Parameters that are global batch sizes: each must divide evenly among the ranks."""
    headline_metrics: tuple[str, ...] = ()
    """The two or three metrics that the progress display shows."""
    caveats: Mapping[str, str] = field(default_factory=dict)
    """For a stage that trains a policy: limits of its win rate, by judge."""

    def for_candidate(self, candidate: str) -> StageSpec:
        """The evaluation of a candidate policy; for PPO the name stays `evaluate`."""
        name = self.name if candidate == "ppo" else f"{self.name}_{candidate}"
        return replace(self, name=name, headline_metrics=("sft/score", f"{candidate}/score"))
