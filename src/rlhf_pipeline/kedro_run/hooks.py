"""Kedro hooks in three classes: check a run, run its stages, record it in MLflow.

Every `kedro` command imports this module, so what only a run needs is imported when it begins.
"""

import logging
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol, MemoryDataset
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from rich.console import Console

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.errors import Interrupted, StageError, without_secrets
from rlhf_pipeline.kedro_run.config_loader import check_environment
from rlhf_pipeline.pipelines.table import (
    RUN,
    blocks_of,
    kinds_of_results,
    pipeline_of,
    policy_stages,
    stage_specs,
)
from rlhf_pipeline.stages.job import RunContext, StageListener, StageStore, Status, forced_stages

if TYPE_CHECKING:
    from rlhf_pipeline.tracking.mirror import MlflowTracker

logger = logging.getLogger(__name__)

NAME_LENGTH = 120
"""Characters of a name that MLflow's table of runs has room for."""


def run_context(catalog: CatalogProtocol, *listeners: StageListener) -> RunContext:
    """Build the context of a run from its parameters."""
    from rlhf_pipeline.stages.store import StoredStages

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


class CheckHook:
    """Ends a run as early as possible: before the catalog exists if parameters are wrong, before
    the first node if the chosen nodes lack something, before a node if its inputs are wrong."""

    context: KedroContext
    nodes: set[str]
    blocks: dict[str, Any]
    mixture: dict[str, list[str]]
    """The published inputs of the run that other parameters made, with the changes."""

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        """Check environment and parameters; nodes and commands get the blocks validated here."""
        from rlhf_pipeline.kedro_run.checks import check, check_root, for_gpus, sized
        from rlhf_pipeline.stages.launch.resources import visible_gpus

        self.context, loader = context, context.config_loader
        check_environment(Path(loader.conf_source), context.env)
        check_root(str((loader.runtime_params or {}).get("root") or loader["globals"]["root"]))
        gpus = visible_gpus()
        parameters = for_gpus(loader["parameters"], gpus)
        blocks = check(parameters, gpus=len(gpus), origin=loader.origin)
        if parameters.get("policy_seed") is None:
            parameters = parameters | {"policy_seed": parameters["seed"]}
        loader["parameters"] = parameters | sized(blocks)

    @hook_impl
    def after_catalog_created(self, catalog: CatalogProtocol) -> None:
        """Let checks name the file that set a parameter."""
        from rlhf_pipeline.kedro_run.checks import CONF

        catalog[CONF] = MemoryDataset(self.context.config_loader, copy_mode="assign")

    @hook_impl(tryfirst=True)
    def before_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol
    ) -> None:
        """Check what the chosen nodes need and read, and say what the user should know."""
        from rlhf_pipeline.kedro_run.checks import before_run
        from rlhf_pipeline.kedro_run.published_inputs import check_published
        from rlhf_pipeline.verdict.statistics import smallest_visible_win_rate

        self.blocks = before_run(pipeline, catalog)
        self.nodes = {node.name for node in pipeline.nodes}
        if "evaluate" in blocks_of(self.nodes):
            prompts = self.blocks["evaluate"].prompts
            percent = 100 * smallest_visible_win_rate(prompts)
            text = "at most %d prompts (evaluate.prompts), which show win rates from %.1f%% up"
            logger.info(f"evaluate: {text}", prompts, percent)
        command = whole_run(run_params, pipeline)
        self.mixture = check_published(pipeline, catalog, self.blocks, command)

    @hook_impl(tryfirst=True)
    def before_node_run(self, node: Node, inputs: dict[str, Any]) -> None:
        from rlhf_pipeline.kedro_run.checks import before_node

        before_node(node.name, inputs, self.nodes, self.blocks)


class RecordHook:
    """Records a `kedro run` as one MLflow run; each stage that is launched is a child of it."""

    tracker: "MlflowTracker"
    explained: click.ClickException
    """The error that ended the run."""
    _verdict: str

    def __init__(self, check: CheckHook) -> None:
        self._check = check

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any]) -> None:
        """Describe the MLflow run, which the first stage opens."""
        from rlhf_pipeline.tracking.mirror import MlflowTracker, mixture_tag
        from rlhf_pipeline.tracking.store import tracking_uri

        context, self._verdict = self._check.context, ""
        tags = {"kedro.version": str(run_params["run_id"]), **mixture_tag(self._check.mixture)}
        chosen = {name: str(value) for name, value in context.config_loader.chosen().items()}
        run, project = run_name(run_params), context.project_path
        self.tracker = MlflowTracker(tracking_uri(project), project, run, tags, chosen)

    @hook_impl
    def after_node_run(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Send what an outage held back, which the registration needs, and log the page. A run that
        only registers opens its MLflow run here."""
        from rlhf_pipeline.runtime.manifest import Manifest
        from rlhf_pipeline.verdict.comparison import read_evaluation
        from rlhf_pipeline.verdict.words import summary

        self.tracker.reconcile()
        kinds = kinds_of_results()
        for name, output in outputs.items():
            if kinds.get(name) == "evaluation":
                self._verdict = summary(read_evaluation(output))
            if kinds.get(name) == "evaluation_page":
                (folder,) = [inputs[one] for one in inputs if kinds.get(one) == "evaluation"]
                self.tracker.log_page(Manifest.read(folder).fingerprint, output)

    @hook_impl
    def after_pipeline_run(self) -> None:
        self.tracker.end("FINISHED", self._verdict)

    @hook_impl
    def on_pipeline_error(self, error: Exception) -> None:
        """Explain the error, and close the MLflow run with its real status and the reason."""
        from rlhf_pipeline.kedro_run.explain import explain

        self.explained = explain(error)
        status: Status = "KILLED" if isinstance(self.explained, Interrupted) else "FAILED"
        reason = without_secrets(self.explained.format_message())
        self.tracker.end(status, f"**{status.capitalize()}**\n\n```\n{reason}\n```")


class RunHook:
    """Gives the nodes their stages, shows these, and prints the results."""

    _stages: RunContext
    _outputs: dict[str, Any]

    def __init__(self, check: CheckHook, record: RecordHook, console: Console) -> None:
        self._check, self._record, self._console = check, record, console

    @hook_impl
    def before_pipeline_run(self, catalog: CatalogProtocol) -> None:
        """Make the stage runner, which the display, the summary and MLflow follow."""
        from rlhf_pipeline.kedro_run.results import StageSummary
        from rlhf_pipeline.stages.progress import ProgressDisplay
        from rlhf_pipeline.stages.run import StageRunner

        check, display = self._check, ProgressDisplay(self._console)
        summary = StageSummary(self._console, check.nodes, check.blocks)
        context = run_context(catalog, display, summary, self._record.tracker)
        self._stages, self._outputs = replace(context, mixture=check.mixture), {}
        RUN.update(stages=StageRunner(self._stages), project=check.context.project_path)

    @hook_impl
    def after_node_run(self, outputs: dict[str, Any]) -> None:
        """Remember the outputs: another run may publish newer versions before this one ends."""
        self._outputs |= outputs

    @hook_impl
    def after_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol
    ) -> None:
        """Print the results of this run and their paths, and wait for uploads."""
        from rlhf_pipeline.kedro_run.results import print_results

        results = {name: self._outputs[name] for name in sorted(pipeline.all_outputs())}
        for name, result in results.items():
            if isinstance(result, Path | str):
                results[name] = catalog.load(name)  # the published copy
        print_results(results, self._console, run_params.get("env"))
        self._stages.stored.close()

    @hook_impl(trylast=True)
    def on_pipeline_error(self, error: Exception) -> None:
        """Wait for uploads, after MLflow knows of the end, and raise the explained error."""
        try:
            self._stages.stored.close()
        except StageError as fault:  # the error that ended the run is reported
            logger.warning("%s", fault.message)
        if self._record.explained is not error:
            raise self._record.explained from error
