"""A stage's configuration as the parameters of its MLflow run."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.stages.events import StageRun

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


def parameters(config: dict[str, Any], seed: int) -> dict[str, str]:
    """A stage's resolved configuration as MLflow parameters: {"ppo": {"lr": 1e-6}} is {"ppo.lr": "1e-06"}.

    Values other than strings are spelled as JSON, as in job.json. Characters that MLflow refuses in a name, which a
    user's own keys may hold, become underscores.
    """
    from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, MAX_PARAM_VAL_LENGTH

    flat = {**_flatten(config), "seed": seed}
    return {
        re.sub(r"[^\w.\- /:]", "_", name)[:MAX_ENTITY_KEY_LENGTH]: cut(
            value if isinstance(value, str) else json.dumps(value), MAX_PARAM_VAL_LENGTH
        )
        for name, value in flat.items()
    }


def cut(value: str, length: int) -> str:
    """A value as long as MLflow takes it; one that is cut ends in an ellipsis, and is whole in job.json."""
    return value if len(value) <= length else value[: length - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= (
            _flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict) and value
            else {prefix + name: value}
        )
    return flat


def log_parameters(client: MlflowClient, opened: Run, run: StageRun) -> None:
    """Log what the run lacks. MLflow refuses to change a parameter; operational ones may differ between attempts."""
    from mlflow.entities import Param

    wanted = parameters(run.config, run.seed)
    missing = [
        Param(name, value) for name, value in wanted.items() if name not in opened.data.params
    ]
    client.log_batch(opened.info.run_id, params=missing)
