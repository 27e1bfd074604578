"""Certificates: what `kedro rlhf prove` found equal, bit for bit, for trainings of one kind.

A certificate is `certificates/STAGE-KEY.json` in the workspace. The key is the digest of what
decides whether training repeats: stage, parameters without lengths, versions, ranks and processor.
"""

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.runtime.manifest import Manifest, json_digest

Property = Literal["resume", "repeat"]
FOLDER = "certificates"
LENGTHS = {
    "steps", "epochs", "rounds", "prompts", "critic_warmup_steps", "evaluations", "log_every",
    "checkpoint_every", "checkpoint_at_evaluations", "keep_last", "keep_best", "evaluate_at_start",
    "gate",
}  # fmt: skip
"""Parameters of how long a training is, how often it writes, and what its model must reach, which
no short training can."""


@dataclass
class Certificate:
    """What was found for one stage."""

    stage: str
    key: str
    versions: Mapping[str, str]
    ranks: int
    processor: str
    seed: int
    digests: Mapping[str, Mapping[str, str]]
    made: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))
    tries: dict[str, list[tuple[str, str | None]]] = field(default_factory=dict)
    """By property: what was done, and the first difference."""

    @classmethod
    def of(
        cls, stage: str, config: Mapping[str, Any], versions: Mapping[str, str], ranks: int,
        seed: int, digests: Mapping[str, Mapping[str, str]],
    ) -> Self:  # fmt: skip
        key = certificate_key(stage, config, versions, ranks)
        return cls(stage, key, versions, ranks, processor(), seed, digests)

    def note(self, what: Property, done: str, difference: str | None) -> None:
        """Add a try and its first difference."""
        self.tries.setdefault(what, []).append((done, difference))

    def words(self, what: str) -> str:
        """How many tries were equal: "3 of 3 equal"."""
        tries = self.tries.get(what, [])
        return f"{sum(found is None for _, found in tries)} of {len(tries)} equal"

    def summary(self) -> str:
        """All that was tried: "resume: 3 of 3 equal; repeat: 1 of 1 equal"."""
        return "; ".join(f"{what}: {self.words(what)}" for what in self.tries)

    def differences(self) -> Iterator[str]:
        """A line for each try that differed."""
        for what, tries in self.tries.items():
            for done, found in tries:
                if found is not None:
                    yield f"{self.stage}, {what}, {done}: {found}"

    def write(self, workspace: Path) -> None:
        (workspace / FOLDER).mkdir(exist_ok=True)
        text = json.dumps(asdict(self), indent=2)
        write_atomically(workspace / FOLDER / f"{self.stage}-{self.key[:16]}.json", text)


def certificate_of(
    workspace: Path, stage: str, config: Mapping[str, Any], versions: Mapping[str, str], ranks: int
) -> Certificate | None:
    """The certificate of trainings of this kind on this machine; None without one."""
    key = certificate_key(stage, config, versions, ranks)
    file = workspace / FOLDER / f"{stage}-{key[:16]}.json"
    return Certificate(**json.loads(file.read_text())) if file.is_file() else None


def certificate_for(workspace: Path, made: Manifest) -> Certificate | None:
    """The certificate of trainings like that of an artifact."""
    return certificate_of(workspace, made.stage, made.config, made.versions, made.ranks)


def certificate_key(
    stage: str, config: Mapping[str, Any], versions: Mapping[str, str], ranks: int
) -> str:
    """What two trainings share of which one can stand for the other."""
    kept = [(n, x) for n, x in leaves(config) if n.rpartition(".")[2] not in LENGTHS]
    return json_digest([stage, kept, dict(versions), ranks, processor()])


@cache
def processor() -> str:
    """The GPUs of this machine, or its processor."""
    if os.environ.get("DS_ACCELERATOR") != "cpu":
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            listed = subprocess.run(command, capture_output=True, text=True, check=True)
            return ", ".join(sorted({*listed.stdout.splitlines()}))
        except (OSError, subprocess.CalledProcessError):
            pass  # a machine without GPUs
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
