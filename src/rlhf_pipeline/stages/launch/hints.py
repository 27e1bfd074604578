"""Known failures of a launched program: how to recognise them, their cause, and what helps.

`hints.toml` feeds the hints in error messages, and the table in docs/troubleshooting.md.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from rlhf_pipeline.config.block import leaves

DISK_FULL = "disk full"

_LIMITS = {"micro_batch_tokens": 1, "batch_size_per_gpu": 1, "processes": 1, "zero_stage": 3}
"""Field -> the value that cannot be lowered or raised further."""


@dataclass(frozen=True)
class Hint:
    """One known failure, recognised either by patterns or by a signal."""

    name: str
    cause: str
    advice: str = ""
    """What to do besides changing parameters, in complete sentences."""
    remedies: Sequence[str] = ()
    """Imperative sentences about one parameter each. The last part of its name is in braces."""
    patterns: Sequence[str] = ()
    """Regular expressions for the failing rank's reason."""
    signal: str = ""
    """Name of the signal that ended a rank."""


HINTS = [
    Hint(**fields)
    for fields in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["hint"]
]
"""The first that applies is shown."""

FOLLOW_UP = re.compile(
    r"Connection (closed|reset) by peer|ncclRemoteError|remote process exited"
    r"|NCCL communicator was aborted|Broken pipe"
)
"""What a rank reports when it lost a peer: never the first cause."""


def find_hint(reason: str, status: int | None = None) -> Hint | None:
    """The known failure behind a rank's end.

    Args:
        reason: the reason that the rank left.
        status: exit status of a rank that left none, the negative number of a signal.
    """

    def applies(hint: Hint) -> bool:
        if hint.patterns:
            return re.search("|".join(hint.patterns), reason) is not None
        return status == -Signals[hint.signal]

    return next(filter(applies, HINTS), None)


def advice(hint: Hint, parameters: Mapping[str, Any]) -> str:
    """What to do, with the names and values of the parameters that can still change.

    `parameters` are the stage's blocks and `launch`, by name, as JSON types.
    """
    sentences = []
    for remedy in hint.remedies:
        field = remedy[remedy.index("{") + 1 : remedy.index("}")]
        for name, value in leaves(parameters):
            shown = json.dumps(value)
            is_exhausted = value in (None, _LIMITS.get(field)) or remedy.endswith(f" to {shown}.")
            if name.rpartition(".")[2] == field and not is_exhausted:
                sentences.append(remedy.format_map({field: f"{name} ({shown})"}))
    return " ".join([*sentences, *filter(None, [hint.advice])])
