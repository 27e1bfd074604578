"""Kedro hooks: check the parameters, run and track the stages, print the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol, MemoryDataset
from kedro.pipeline import Pipeline
from rich.console import Console

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import Interrupted, PipelineError
from rlhf_pipeline.preflight import check_root, preflight
from rlhf_pipeline.redaction import without_secrets
from rlhf_pipeline.results import SplitSummary, print_results
from rlhf_pipeline.stage_registry import parameter_blocks, stage_specs
from rlhf_pipeline.stages.context import RunContext, forced_stages
from rlhf_pipeline.stages.events import Listeners, StageListener, Status
from rlhf_pipeline.stages.job import Stages
from rlhf_pipeline.stages.launch.resources import free_port, gpu_count
from rlhf_pipeline.stages.progress import ProgressDisplay
from rlhf_pipeline.stages.run import StageRunner
from rlhf_pipeline.tracking.runs import MlflowTracker
from rlhf_pipeline.tracking.store import tracking_uri

STAGES = "stages"
"""The catalog entry from which every node gets its `Stages`."""


class PreflightHook:
    """Fails before the first node runs if the parameters are invalid."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Check the root folder before Kedro derives the paths of the catalog from it."""
        loader = context.config_loader
        check_root(str((loader.runtime_params or {}).get("root") or loader["globals"]["root"]))

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, catalog: CatalogProtocol) -> None:
        """Check all parameters together, and that a configured port is free."""
        prepare_parameters(catalog)
        free_port(LaunchConfig.model_validate(catalog.load("parameters")["launch"]).master_port)


def prepare_parameters(catalog: CatalogProtocol) -> None:
    """Check all parameters on this machine; add the defaults of blocks missing in all files."""
    parameters: dict[str, Any] = catalog.load("parameters")
    preflight(parameters, gpus=gpu_count())
    for name, block in parameter_blocks().items():
        if f"params:{name}" not in catalog:
            catalog[f"params:{name}"] = block()


def run_context(catalog: CatalogProtocol, *listeners: StageListener) -> RunContext:
    """Build the context of a run from its parameters."""
    parameters: dict[str, Any] = catalog.load("parameters")
    base_model = BaseModelConfig.model_validate(parameters["base_model"])
    return RunContext(
        workspace=catalog.load("workspace"),
        launch=LaunchConfig.model_validate(parameters["launch"]),
        forced=forced_stages(parameters.get("force"), stage_specs()),
        trust_remote_code=base_model.trust_remote_code,
        listener=Listeners(listeners),
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

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Remember the project folder, which contains the tracking database."""
        self._project = Path(context.project_path)

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any], catalog: CatalogProtocol) -> None:
        """Start the parent run, and make the stage runner."""
        names = run_params.get("pipeline_names") or ["__default__"]
        self._tracker = MlflowTracker(tracking_uri(self._project), self._project)
        listeners = ProgressDisplay(self._console), SplitSummary(self._console), self._tracker
        provide_stages(catalog, StageRunner(run_context(catalog, *listeners)))
        self._tracker.start("+".join(names), _tags(run_params))

    @hook_impl
    def before_node_run(self) -> None:
        """Send to MLflow what an outage held back: the registration needs it."""
        if self._tracker is not None:
            self._tracker.catch_up()

    @hook_impl
    def after_pipeline_run(self) -> None:
        """Close the parent run."""
        self._end("FINISHED")

    @hook_impl
    def on_pipeline_error(self, error: Exception) -> None:
        """Close the parent run with its real status."""
        self._end("KILLED" if isinstance(error, Interrupted) else "FAILED")

    def _end(self, status: Status) -> None:
        if self._tracker is not None:
            self._tracker.end(status)
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
    def after_pipeline_run(self, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Print the comparison, the registered versions, and the paths of all results."""
        results = {
            name: catalog.load(name)
            if isinstance(self._outputs[name], Path)
            else self._outputs[name]
            for name in sorted(pipeline.all_outputs())
        }
        print_results(results, self._console)


class ErrorHook:
    """Shows the errors of this package without a traceback: Kedro's catalog wraps them."""

    @hook_impl(trylast=True)
    def on_pipeline_error(self, error: Exception) -> None:
        """Raise the wrapped `PipelineError`, after the other hooks have finished."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PipelineError):
            cause = cause.__cause__
        if cause is not None:
            raise cause


def _tags(run_params: dict[str, Any]) -> dict[str, str]:
    """The options of `kedro run` as tags of the parent run."""
    names = ("env", "from_nodes", "to_nodes", "node_names", "tags", "runtime_params")
    options = {name: run_params.get(name) for name in names}
    return {
        "kedro.version": str(run_params["run_id"]),
        **{f"kedro.{key}": without_secrets(str(value)) for key, value in options.items() if value},
    }
