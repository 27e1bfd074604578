"""What a stage took on this machine, and what `kedro rlhf plan --measure` forecast for it.

STAGE/RECIPE/usage.json    in the workspace: a `Usage`
forecasts/STAGE.json       in the workspace: a `Forecast`, the newest one
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rlhf_pipeline.runtime.certificates import processor
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.runtime.manifest import Manifest

USAGE, FORECASTS = "usage.json", "forecasts"


@dataclass(frozen=True)
class Usage:
    """What the last launch of a finished stage took."""

    seconds: float
    """From the start of its program until its result was on disk."""
    peak: int
    """Bytes of the rank that held most: of its GPU, or else of main memory with mapped files."""
    resumed: bool
    """Whether the launch resumed, so that an earlier one did a part of the work."""

    def write(self, directory: Path) -> None:
        write_atomically(directory / USAGE, json.dumps(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> Self:
        return cls(**json.loads((directory / USAGE).read_text()))


def usage_of(workspace: Path, made: Manifest) -> Usage | None:
    """What an artifact took here; None if it was made elsewhere."""
    found = (workspace / made.stage).glob(f"{made.fingerprint[:16]}*/{USAGE}")
    newest = max(found, key=lambda file: file.stat().st_mtime_ns, default=None)
    return Usage.read(newest.parent) if newest else None


@dataclass(frozen=True)
class Forecast:
    """What a stage will take."""

    stage: str
    config: Mapping[str, Any]
    """Its parameters, as in the manifest."""
    ranks: int
    seconds: tuple[float, float, float]
    """The least, the expected and the largest value."""
    peak: float
    """As `Usage.peak`."""
    machine: str = field(default_factory=processor)

    def write(self, workspace: Path) -> None:
        """Replace the forecast of this stage."""
        (workspace / FORECASTS).mkdir(exist_ok=True)
        text = json.dumps(asdict(self), indent=2)
        write_atomically(workspace / FORECASTS / f"{self.stage}.json", text)


def forecast_of(workspace: Path, made: Manifest) -> Forecast | None:
    """The forecast for an artifact; None without one for its parameters, on this machine."""
    file = workspace / FORECASTS / f"{made.stage}.json"
    if not file.is_file():
        return None
    found = Forecast(**json.loads(file.read_text()))
    same = _kind(found.config) == _kind(made.config) and found.ranks == made.ranks
    return found if same and found.machine == processor() else None


def _kind(config: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters without the round of a policy that trains on its own answers."""
    return {name: block for name, block in config.items() if name != "table"}
