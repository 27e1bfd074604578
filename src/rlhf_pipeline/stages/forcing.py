"""Running stages again although they are finished, because the user said so."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from rlhf_pipeline.config.architecture import suggestion
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.stages.job import PROGRAMS

_stages: set[str] = set()
_done: set[str] = set()


def forced_stages(value: Any) -> list[str]:
    """The stages that the parameter `force` names: true for all, or a list of names, or names with blanks between them.

    Raises:
        ConfigError: it names no stage, or is something else.
    """
    if value is None or isinstance(value, bool):
        return list(PROGRAMS) if value else []
    names = value.split() if isinstance(value, str) else value
    if not isinstance(names, list):
        raise ConfigError(f"force: must be true, a stage, or a list of stages, is {value!r}")
    for name in names:
        if name not in PROGRAMS:
            raise ConfigError(
                f"force: no stage {name!r}{suggestion(str(name), PROGRAMS)}; known are {', '.join(PROGRAMS)}"
            )
    return names


@contextmanager
def forcing(stages: Collection[str]) -> Iterator[None]:
    """Inside the block every recipe of these stages runs again, once: two nodes may need the same source."""
    _stages.update(stages)
    try:
        yield
    finally:
        _stages.clear()
        _done.clear()


def forced(stage: str, fingerprint: str) -> bool:
    """Whether the stage is to run although finished. The second time it is asked of a fingerprint, it has run: False."""
    if stage not in _stages or fingerprint in _done:
        return False
    _done.add(fingerprint)
    return True
