"""The parameter `force`: stages that run again although they are finished."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rlhf_pipeline.errors import ConfigError, suggestion


def forced_stages(value: Any, known: Collection[str]) -> frozenset[str]:
    """The stages to force: true for all, a list of names, or names separated by blanks.

    Args:
        value: the parameter `force`.
        known: names of all stages.

    Raises:
        ConfigError: a name is unknown, or the value is of another type.
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
