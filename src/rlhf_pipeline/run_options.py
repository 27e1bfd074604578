import shlex
from collections.abc import Mapping
from typing import Any

from kedro.pipeline import Pipeline

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.errors import without_secrets
from rlhf_pipeline.pipelines.table import pipeline_of, policy_stages

NAME_LENGTH = 120
"""Characters of a name that MLflow's table of runs has room for."""


def whole_run(run_params: Mapping[str, Any], pipeline: Pipeline) -> str:
    """The command that runs all stages with the same parameters as a part of them.

    Args:
        run_params: the options, as Kedro gives them to hooks.
        pipeline: the nodes of the part; they decide between PPO and another algorithm.
    """
    nodes = {node.name for node in pipeline.nodes}
    policies = [name for name in policy_stages() if name in nodes] or ["ppo"]
    whole = pipeline_of(policies[-1])
    command = f"kedro run --pipeline={whole}"
    if env := _environment(run_params):
        command += f" --env={env}"
    if params := ",".join(_params(run_params)):
        command += f" --params={shlex.quote(params)}"
    return command


def run_name(run_params: Mapping[str, Any]) -> str:
    """What the run is, e.g. "full tiny seed=5": nodes or pipelines, environment, parameters."""
    pipelines = run_params.get("pipeline_names") or ["__default__"]
    names = ["full" if name == "__default__" else name for name in pipelines]
    parts = [
        "+".join(run_params.get("node_names") or names),
        *(f"from {node}" for node in run_params.get("from_nodes") or []),
        _environment(run_params),
        *(param for param in _params(run_params) if not param.startswith("root=")),
    ]
    return " ".join(filter(None, parts))[:NAME_LENGTH]


def run_tags(run_params: Mapping[str, Any]) -> dict[str, str]:
    """The options as tags, `kedro.env` and so on."""
    names = ("env", "from_nodes", "to_nodes", "node_names", "tags", "runtime_params")
    options = {name: run_params.get(name) for name in names}
    return {
        "kedro.version": str(run_params["run_id"]),
        **{f"kedro.{key}": without_secrets(str(value)) for key, value in options.items() if value},
    }


def _environment(run_params: Mapping[str, Any]) -> str:
    env = run_params.get("env")
    return "" if env in (None, "local") else str(env)


def _params(run_params: Mapping[str, Any]) -> list[str]:
    """The option `--params` as `name=value`, without secrets."""
    values = leaves(run_params.get("runtime_params") or {})
    return [
        without_secrets(f"{name}={'null' if value is None else value}") for name, value in values
    ]
