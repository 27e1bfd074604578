from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kedro.framework.project import pipelines
from kedro.pipeline import Pipeline

from rlhf_pipeline.errors import ConfigError, suggestion


def check_names(chosen: Sequence[str], options: Mapping[str, Any]) -> None:
    """Check the chosen pipelines, and the nodes and data sets in the options of `kedro run`.

    Raises ConfigError with one line for each unknown name.
    """
    known = [name for name in pipelines if name != "__default__"]
    faults = [
        _unknown("--pipeline", name, known, "pipelines") for name in chosen if name not in pipelines
    ]
    if not faults:
        pipeline = sum((pipelines[name] for name in chosen or ["__default__"]), Pipeline([]))
        nodes = [node.name for node in pipeline.nodes]
        parameters = ("parameters", "params")  # `parameters` and `params:NAME`
        data_sets = sorted(
            name for name in pipeline.datasets() if name.partition(":")[0] not in parameters
        )
        named = {
            "--from-nodes": ("from_nodes", nodes, "nodes"),
            "--to-nodes": ("to_nodes", nodes, "nodes"),
            "--nodes": ("node_names", nodes, "nodes"),
            "--from-inputs": ("from_inputs", data_sets, "data sets"),
            "--to-outputs": ("to_outputs", data_sets, "data sets"),
            "--load-versions": ("load_versions", data_sets, "data sets"),
        }
        faults = [
            _unknown(option, name, known, kind)
            for option, (key, known, kind) in named.items()
            for name in options.get(key) or ()
            if name not in known
        ]
    if faults:
        raise ConfigError("\n".join(faults))


def _unknown(option: str, name: str, known: Collection[str], kind: str) -> str:
    return f"{option}: found {name!r}{suggestion(name, known)}; the {kind} are {', '.join(known)}"
