"""The configuration of a stage as parameters of its MLflow run."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.stages.events import StageRun

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


def parameters(config: dict[str, Any], seed: int) -> dict[str, str]:
    """Flatten a configuration: {"ppo": {"lr": 1e-6}} becomes {"ppo.lr": "1e-06"}.

    Values other than strings are written as JSON, as in job.json. A character that MLflow refuses
    in a name, which a user's key can contain, becomes an underscore.
    """
    from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, MAX_PARAM_VAL_LENGTH

    flat = {**_flatten(config), "seed": seed}
    return {
        re.sub(r"[^\w.\- /:]", "_", name)[:MAX_ENTITY_KEY_LENGTH]: truncate(
            value if isinstance(value, str) else json.dumps(value), MAX_PARAM_VAL_LENGTH
        )
        for name, value in flat.items()
    }


def truncate(value: str, length: int) -> str:
    """Cut a value to the length that MLflow accepts, with an ellipsis; job.json has all of it."""
    return value if len(value) <= length else value[: length - 1] + "\N{HORIZONTAL ELLIPSIS}"


def log_parameters(client: MlflowClient, opened: Run, run: StageRun) -> None:
    """Log the parameters that the run lacks.

    MLflow refuses to change a parameter, and operational ones can differ between attempts.
    """
    from mlflow.entities import Param

    wanted = parameters(run.config, run.seed)
    missing = [
        Param(name, value) for name, value in wanted.items() if name not in opened.data.params
    ]
    client.log_batch(opened.info.run_id, params=missing)


def _flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
