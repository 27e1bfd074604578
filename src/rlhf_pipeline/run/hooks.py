"""Kedro hooks, in their order: check the run, run and track its stages, print its results."""

import logging
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol, MemoryDataset
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from rich.console import Console

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.errors import Interrupted, StageError, without_secrets
from rlhf_pipeline.pipelines.table import parameter_blocks, pipeline_of, policy_stages, stage_specs
from rlhf_pipeline.run.checks import check
from rlhf_pipeline.run.config_loader import LayeredConfigLoader, check_environment
from rlhf_pipeline.run.explain import explain
from rlhf_pipeline.run.preflight import CONF, check_inputs, check_pipeline, check_root, sized
from rlhf_pipeline.run.published_inputs import changes_since, published_inputs, refuse_mixture
from rlhf_pipeline.run.results import StageSummary, print_results
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.stages.job import (
    PROJECT,
    STAGES,
    RunContext,
    StageListener,
    StageStore,
    Status,
    forced_stages,
)
from rlhf_pipeline.stages.launch.resources import gpu_count
from rlhf_pipeline.stages.progress import ProgressDisplay
from rlhf_pipeline.stages.run import StageRunner
from rlhf_pipeline.stages.stored import StoredStages
from rlhf_pipeline.tracking.child_run import mixture_tag
from rlhf_pipeline.tracking.mirror import MlflowTracker
from rlhf_pipeline.tracking.store import tracking_uri
from rlhf_pipeline.verdict.comparison import read_evaluation
from rlhf_pipeline.verdict.statistics import smallest_visible_win_rate
from rlhf_pipeline.verdict.words import summary

logger = logging.getLogger(__name__)

NAME_LENGTH = 120
"""Characters of a name that MLflow's table of runs has room for."""


def run_context(catalog: CatalogProtocol, *listeners: StageListener) -> RunContext:
    """Build the context of a run from its parameters."""
    workspace, store = Path(catalog.load("workspace")), catalog.load("store")
    stored = StageStore() if store is None else StoredStages(store, workspace)
    return RunContext(
        workspace=workspace,
        launch=catalog.load("params:launch"),
        progress=catalog.load("params:progress"),
        forced=forced_stages(catalog.load("parameters").get("force"), stage_specs()),
        trust_remote_code=catalog.load("params:base_model").trust_remote_code,
        listener=StageListener(*listeners, stored),
        stored=stored,
    )


def provide(catalog: CatalogProtocol, name: str, value: Any) -> None:
    """Put a value into an entry, such as `STAGES`, which Kedro would replace with a warning."""
    entry = catalog.get(name)
    if entry is None:
        catalog[name] = MemoryDataset(value, copy_mode="assign")
    else:
        entry.save(value)


def whole_run(run_params: Mapping[str, Any], pipeline: Pipeline) -> str:
    """The command that runs all stages with the parameters of a run of only some nodes.

    These nodes, `pipeline`, decide between PPO and another algorithm.
    """
    nodes = {node.name for node in pipeline.nodes}
    policies = [name for name in policy_stages() if name in nodes] or ["ppo"]
    command = f"kedro run --pipeline={pipeline_of(policies[-1])}"
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


def _environment(run_params: Mapping[str, Any]) -> str:
    env = run_params.get("env")
    return "" if env in (None, "local") else str(env)


def _params(run_params: Mapping[str, Any]) -> list[str]:
    """The option `--params` as `name=value`, without secrets."""
    values = leaves(run_params.get("runtime_params") or {})
    return [
        without_secrets(f"{name}={'null' if value is None else value}") for name, value in values
    ]


class PreflightHook:
    """Ends a run as early as possible: before the catalog exists if parameters are wrong, before
    the first node if the chosen nodes lack something, before a node if its inputs are wrong."""

    def __init__(self) -> None:
        self._nodes: set[str] = set()
        self._conf: LayeredConfigLoader | None = None

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        """Check environment and parameters; nodes and commands get the blocks validated here."""
        loader = self._conf = context.config_loader
        check_environment(Path(loader.conf_source), context.env)
        check_root(str((loader.runtime_params or {}).get("root") or loader["globals"]["root"]))
        parameters = loader["parameters"]
        blocks = check(parameters, gpus=gpu_count(), origin=loader.origin)
        loader["parameters"] = parameters | sized(blocks)

    @hook_impl
    def after_catalog_created(self, catalog: CatalogProtocol) -> None:
        """Let checks name the file that set a parameter."""
        provide(catalog, CONF, self._conf)

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Check what the chosen nodes need, and say what the user should know."""
        check_pipeline(pipeline, catalog)
        nodes = self._nodes = {node.name for node in pipeline.nodes}
        if any(name.startswith("evaluate") for name in nodes):
            prompts = catalog.load("params:evaluate").prompts
            percent = 100 * smallest_visible_win_rate(prompts)
            text = "at most %d prompts (evaluate.prompts), which show win rates from %.1f%% up"
            logger.info(f"evaluate: {text}", prompts, percent)

    @hook_impl(tryfirst=True)
    def before_node_run(self, node: Node, catalog: CatalogProtocol, inputs: dict[str, Any]) -> None:
        """Check what the node reads."""
        blocks = {name: catalog.load(f"params:{name}") for name in parameter_blocks()}
        check_inputs(node.name, inputs, self._nodes, blocks)


class StagesHook:
    """Gives the nodes a `StageRunner`; shows stages and results, and tracks them in MLflow.

    A `kedro run` is one MLflow run, and each stage that is launched is a child of it.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._project = Path()
        self._tracker: MlflowTracker | None = None
        self._stored = StageStore()
        self._chosen: dict[str, Any] = {}
        self._summary = ""
        self._outputs: dict[str, Any] = {}

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Remember the project, which contains the tracking database, and the user's parameters."""
        self._project = Path(context.project_path)
        self._chosen = context.config_loader.chosen()

    @hook_impl
    def before_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol
    ) -> None:
        """Check the published inputs, start the parent run, and make the stage runner."""
        tracker = MlflowTracker(tracking_uri(self._project), self._project)
        nodes = {node.name for node in pipeline.nodes}
        blocks = {name: catalog.load(f"params:{name}") for name in parameter_blocks()}
        summary = StageSummary(self._console, nodes, blocks)
        listeners = ProgressDisplay(self._console), summary, tracker
        context = run_context(catalog, *listeners)
        chosen = {name: str(value) for name, value in self._chosen.items()}
        inputs, seed = published_inputs(pipeline, catalog), catalog.load("params:seed")
        changes = changes_since(inputs, blocks, seed)
        if catalog.load("parameters").get("inputs") != "newest":
            refuse_mixture(changes, whole_run(run_params, pipeline))
        self._stored = context.stored
        context = replace(context, mixture=changes)
        provide(catalog, STAGES, StageRunner(context))
        provide(catalog, PROJECT, self._project)
        self._tracker = tracker
        tags = {"kedro.version": str(run_params["run_id"]), **mixture_tag(changes)}
        tracker.describe(run_name(run_params), tags, chosen)

    @hook_impl
    def after_node_run(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Remember outputs and verdict, and log the page. Send to MLflow what an outage held back:
        the registration needs it. Another run may publish newer versions before this one ends."""
        self._outputs |= outputs
        if self._tracker is None:
            return
        self._tracker.reconcile()
        for name, output in outputs.items():
            if name.endswith("evaluation"):
                self._summary = summary(read_evaluation(output))
            if name.endswith("evaluation_page"):
                fingerprint = Manifest.read(inputs[name.removesuffix("_page")]).fingerprint
                self._tracker.log_page(fingerprint, output)

    @hook_impl
    def after_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol
    ) -> None:
        """Print the results of this run and their paths, and close the parent run."""
        results = {
            name: catalog.load(name)
            if isinstance(self._outputs[name], Path | str)
            else self._outputs[name]
            for name in sorted(pipeline.all_outputs())
        }
        print_results(results, self._console, run_params.get("env"))
        self._end("FINISHED", self._summary)
        self._stored.close()

    @hook_impl
    def on_pipeline_error(self, error: Exception) -> None:
        """Close the parent run with its real status and the reason."""
        explained = explain(error)
        status: Status = "KILLED" if isinstance(explained, Interrupted) else "FAILED"
        reason = without_secrets(explained.format_message())
        self._end(status, f"**{status.capitalize()}**\n\n```\n{reason}\n```")
        try:
            self._stored.close()
        except StageError as fault:  # the error that ended the run is reported
            logger.warning("%s", fault.message)

    def _end(self, status: Status, summary: str) -> None:
        if self._tracker is not None:
            self._tracker.end(status, summary)
            self._tracker = None
