"""Kedro hooks: check the parameters, run and track the stages, print the results."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol, MemoryDataset
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from rich.console import Console

from rlhf_pipeline.config.architecture import positions_in
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config_loader import check_environment
from rlhf_pipeline.data.split_page import require_true_answers
from rlhf_pipeline.datasets.artifact import PathDataset
from rlhf_pipeline.errors import Interrupted, StageError, without_secrets
from rlhf_pipeline.evaluation.comparison import read_evaluation
from rlhf_pipeline.evaluation.report import summary
from rlhf_pipeline.explain import explain
from rlhf_pipeline.preflight import (
    check_gate,
    check_lengths,
    check_memory,
    check_phases,
    check_root,
    preflight,
)
from rlhf_pipeline.published_inputs import changes_since, published_inputs, refuse_mixture
from rlhf_pipeline.results import StageSummary, print_results
from rlhf_pipeline.run_options import run_name, run_tags, whole_run
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.stage_registry import parameter_blocks, policy_stages, stage_specs
from rlhf_pipeline.stages.context import RunContext, forced_stages
from rlhf_pipeline.stages.events import StageListener, Status
from rlhf_pipeline.stages.job import STAGES, Stages
from rlhf_pipeline.stages.launch.layout import hardware_at_hand
from rlhf_pipeline.stages.launch.resources import free_port, gpu_count
from rlhf_pipeline.stages.progress import ProgressDisplay
from rlhf_pipeline.stages.run import StageRunner
from rlhf_pipeline.stages.stored import StoredStages
from rlhf_pipeline.statistics import smallest_visible_win_rate
from rlhf_pipeline.storage.store import Store
from rlhf_pipeline.tracking.child_run import mixture_tag
from rlhf_pipeline.tracking.runs import MlflowTracker
from rlhf_pipeline.tracking.store import tracking_uri

logger = logging.getLogger(__name__)

PROJECT = "params:project"
"""The catalog entry with the project folder, which contains the tracking database."""


class PreflightHook:
    """Fails before the first node runs if the parameters are invalid."""

    def __init__(self) -> None:
        self._nodes: set[str] = set()

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        """Check environment and parameters before Kedro derives anything from them."""
        loader = context.config_loader
        check_environment(Path(loader.conf_source), context.env)
        check_root(str((loader.runtime_params or {}).get("root") or loader["globals"]["root"]))
        preflight(loader["parameters"], gpus=gpu_count(), origin=loader.origin)

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Check what the chosen nodes need, and say what the user should know."""
        provide_default_blocks(catalog)
        check_pipeline(pipeline, catalog)
        nodes = self._nodes = {node.name for node in pipeline.nodes}
        base_model = parameter_block(catalog, "base_model")
        if "base_model" in nodes and base_model.is_gguf:
            logger.warning(
                "base_model.path: quantized weights of %s become float32; the precision they lost "
                "is not restored. The metric base_model/bits_per_weight is what they have",
                base_model.path,
            )
        if any(name.startswith("evaluate") for name in nodes):
            prompts = parameter_block(catalog, "evaluate").prompts
            logger.info(
                "evaluate: at most %d prompts (evaluate.prompts), which show win rates from %.1f%% "
                "up",
                prompts,
                100 * smallest_visible_win_rate(prompts),
            )

    @hook_impl(tryfirst=True)
    def before_node_run(self, node: Node, catalog: CatalogProtocol, inputs: dict[str, Any]) -> None:
        """Check what a node reads: the model's positions, the accuracy of a reward model, and the
        true answers that judges, or rewards of a run of PPO, read.

        A model of the hub is first seen here, and so are the counts of a split.
        """
        for name in {"base_model", "sft_model"} & inputs.keys():
            limits = (parameter_block(catalog, block) for block in ("split", "ppo", "evaluate"))
            check_lengths(positions_in(inputs[name]), *limits)
        if "split" in inputs:
            trains_another = "ppo" not in self._nodes and self._nodes & policy_stages().keys()
            ppo, evaluate = (parameter_block(catalog, block) for block in ("ppo", "evaluate"))
            rewards = () if trains_another or "params:evaluate" in inputs else ppo.rewards
            require_true_answers(inputs["split"], rewards, evaluate.judges)
        if node.name == "ppo":
            gate = parameter_block(catalog, "reward_model").gate
            check_gate(inputs["reward_model"], gate, parameter_block(catalog, "ppo"))


def provide_default_blocks(catalog: CatalogProtocol) -> None:
    """Add the defaults of parameter blocks missing in all files."""
    for name, block in parameter_blocks().items():
        if f"params:{name}" not in catalog:
            catalog[f"params:{name}"] = block()


def parameter_block(catalog: CatalogProtocol, name: str) -> Any:
    """A parameter block, validated."""
    return parameter_blocks()[name].model_validate(catalog.load(f"params:{name}"))


def check_pipeline(pipeline: Pipeline, catalog: CatalogProtocol) -> None:
    """Check what the nodes of a run need: stores, prompts for each phase, memory, a free port.

    Raises the errors with which a run ends before its first stage.
    """
    check_stores(pipeline, catalog)
    nodes = {node.name for node in pipeline.nodes}
    check_phases(parameter_block(catalog, "split").weights, nodes)
    launch = launch_config(catalog)
    free_port(launch.master_port)
    if launch.memory_check == "off":
        return
    refuses = launch.memory_check == "refuse"
    hardware = hardware_at_hand(launch)
    parameters = as_json({name: parameter_block(catalog, name) for name in parameter_blocks()})
    for warning in check_memory(parameters, nodes, hardware, refuses=refuses):
        logger.warning("%s", warning)


def launch_config(catalog: CatalogProtocol) -> LaunchConfig:
    """The block `launch`."""
    return LaunchConfig.model_validate(catalog.load("parameters")["launch"])


def store_of(catalog: CatalogProtocol) -> Store | None:
    """The store for stages and checkpoints. Configurations of earlier versions have no entry."""
    return catalog.load("store") if "store" in catalog else None


def check_stores(pipeline: Pipeline, catalog: CatalogProtocol) -> None:
    """Write to the store and to those of the pipeline's outputs, and warn of a wrong clock.

    Raises StageError if a store fails.
    """
    entries = [catalog.get(name) for name in sorted(pipeline.all_outputs())]
    published = [entry for entry in entries if isinstance(entry, PathDataset)]
    for store in filter(None, [store_of(catalog), *(entry.store for entry in published)]):
        store.check()
    for entry in published:
        if fault := entry.clock_fault():
            logger.warning("%s", fault)


def run_context(catalog: CatalogProtocol, *listeners: StageListener) -> RunContext:
    """Build the context of a run from its parameters."""
    workspace, store = Path(catalog.load("workspace")), store_of(catalog)
    stored = None if store is None else StoredStages(store, workspace)
    return RunContext(
        workspace=workspace,
        launch=launch_config(catalog),
        forced=forced_stages(catalog.load("parameters").get("force"), stage_specs()),
        trust_remote_code=parameter_block(catalog, "base_model").trust_remote_code,
        listener=StageListener(*listeners, *([] if stored is None else [stored])),
        stored=stored,
    )


def provide_stages(catalog: CatalogProtocol, stages: Stages) -> None:
    """Give the nodes the object that runs their stages."""
    catalog[STAGES] = MemoryDataset(stages, copy_mode="assign")


class StagesHook:
    """Gives the nodes a `StageRunner`; shows their stages and tracks them in MLflow.

    A `kedro run` is one MLflow run, and each stage that is launched is a child of it.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._project = Path()
        self._tracker: MlflowTracker | None = None
        self._stored: StoredStages | None = None
        self._chosen: dict[str, Any] = {}
        self._summary = ""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Remember the project folder, which contains the tracking database, and the parameters
        that the user chose."""
        self._project = Path(context.project_path)
        self._chosen = context.config_loader.chosen()

    @hook_impl
    def before_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol
    ) -> None:
        """Check the published inputs, start the parent run, and make the stage runner."""
        tracker = MlflowTracker(tracking_uri(self._project), self._project)
        listeners = ProgressDisplay(self._console), StageSummary(self._console), tracker
        context = run_context(catalog, *listeners)
        chosen = {name: str(value) for name, value in self._chosen.items()}
        changes = changes_since(published_inputs(pipeline, catalog), catalog, context)
        if catalog.load("parameters").get("inputs") != "newest":
            refuse_mixture(changes, whole_run(run_params, pipeline))
        self._stored = context.stored
        context = replace(context, mixture=changes)
        provide_stages(catalog, StageRunner(context))
        catalog[PROJECT] = MemoryDataset(self._project, copy_mode="assign")
        self._tracker = tracker
        tracker.describe(run_name(run_params), run_tags(run_params) | mixture_tag(changes), chosen)

    @hook_impl
    def before_node_run(self) -> None:
        """Send to MLflow what an outage held back: the registration needs it."""
        if self._tracker is not None:
            self._tracker.catch_up()

    @hook_impl
    def after_node_run(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Remember the verdict, and log the page; a run that registers only opens its run here."""
        if self._tracker is not None:
            self._tracker.open()
        for name, output in outputs.items():
            if name.endswith("evaluation"):
                evaluation = read_evaluation(output)
                self._summary = summary(evaluation)
                if self._tracker is not None:
                    self._tracker.log_verdict(Manifest.read(output).fingerprint, evaluation)
            if name.endswith("evaluation_page") and self._tracker is not None:
                fingerprint = Manifest.read(inputs[name.removesuffix("_page")]).fingerprint
                self._tracker.log_page(fingerprint, output)

    @hook_impl
    def after_pipeline_run(self) -> None:
        """Close the parent run."""
        self._end("FINISHED", self._summary)
        if self._stored is not None:
            self._stored.close()

    @hook_impl
    def on_pipeline_error(self, error: Exception) -> None:
        """Close the parent run with its real status and the reason."""
        explained = explain(error)
        status: Status = "KILLED" if isinstance(explained, Interrupted) else "FAILED"
        reason = without_secrets(explained.format_message())
        self._end(status, f"**{status.capitalize()}**\n\n```\n{reason}\n```")
        if self._stored is not None:
            try:
                self._stored.close()
            except StageError as fault:  # the error that ended the run is reported
                logger.warning("%s", fault.message)

    def _end(self, status: Status, summary: str) -> None:
        if self._tracker is not None:
            self._tracker.end(status, summary)
            self._tracker = None


class ResultsHook:
    """Prints the results of the run and their paths."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._outputs: dict[str, Any] = {}

    @hook_impl
    def after_node_run(self, outputs: dict[str, Any]) -> None:
        """Remember the outputs: another run may publish newer versions before this run ends."""
        self._outputs |= outputs

    @hook_impl
    def after_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol
    ) -> None:
        """Print the comparison, the registered versions, and the paths of all results."""
        results = {
            name: catalog.load(name)
            if isinstance(self._outputs[name], Path | str)
            else self._outputs[name]
            for name in sorted(pipeline.all_outputs())
        }
        print_results(results, self._console, run_params.get("env"))
