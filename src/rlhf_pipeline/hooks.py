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
from rlhf_pipeline.stage_registry import stage_specs
from rlhf_pipeline.stages.cache.forcing import forced_stages
from rlhf_pipeline.stages.context import RunContext
from rlhf_pipeline.stages.events import Listeners, StageListener, Status
from rlhf_pipeline.stages.job import Stages
from rlhf_pipeline.stages.launch.resources import free_port, gpu_count, process_count
from rlhf_pipeline.stages.progress import ProgressDisplay
from rlhf_pipeline.stages.run import StageRunner
from rlhf_pipeline.tracking.runs import MlflowTracker
from rlhf_pipeline.tracking.store import tracking_uri

STAGES = "stages"
"""The catalog entry from which every node gets its `Stages`."""


class PreflightHook:
    """Refuses parameters that cannot work before the first node runs."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Check the root folder, from which Kedro makes the paths of the catalog."""
        loader = context.config_loader
        check_root(str((loader.runtime_params or {}).get("root") or loader["globals"]["root"]))

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, catalog: CatalogProtocol) -> None:
        """Check all parameters together, and that a configured port is free."""
        parameters: dict[str, Any] = catalog.load("parameters")
        check(parameters)
        free_port(LaunchConfig.model_validate(parameters["launch"]).master_port)


def check(parameters: dict[str, Any]) -> None:
    """Refuse parameters that cannot work on this machine."""
    processes = process_count(LaunchConfig.model_validate(parameters["launch"]))
    preflight(parameters, processes=processes, gpus=gpu_count())


def run_context(catalog: CatalogProtocol, *listeners: StageListener) -> RunContext:
    """What the parameters decide for all stages of a run."""
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
    """Give the nodes what runs their stages."""
    catalog[STAGES] = MemoryDataset(stages, copy_mode="assign")


class StagesHook:
    """Gives the nodes a `StageRunner`; shows their stages and tracks them in MLflow.

    A `kedro run` is one MLflow run, and each stage that is launched is a child of it.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._project = Path()
        self._tracker: MlflowTracker | None = None
        self._display = ProgressDisplay(console)

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Remember the project's folder, which contains the tracking database."""
        self._project = Path(context.project_path)

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any], catalog: CatalogProtocol) -> None:
        """Start the parent run, and make the stage runner."""
        names = run_params.get("pipeline_names") or ["__default__"]
        self._tracker = MlflowTracker(tracking_uri(self._project), self._project)
        self._display = ProgressDisplay(self._console)
        summary = SplitSummary(self._console)
        context = run_context(catalog, self._display, summary, self._tracker)
        provide_stages(catalog, StageRunner(context))
        self._tracker.start("+".join(names), _tags(run_params))

    @hook_impl
    def before_node_run(self) -> None:
        """Send what the store could not take earlier: the registration looks for it there."""
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
    """Prints what the run made, and where it is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._outputs: dict[str, Any] = {}

    @hook_impl
    def before_pipeline_run(self) -> None:
        """Forget an earlier run of the same process."""
        self._outputs = {}

    @hook_impl
    def after_node_run(self, outputs: dict[str, Any]) -> None:
        """Remember the outputs of this run: by its end, another run may have published newer ones."""
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
    """Shows the pipeline's own errors without a stack: Kedro's catalog wraps them in others."""

    @hook_impl(trylast=True)
    def on_pipeline_error(self, error: Exception) -> None:
        """Raise the `PipelineError` inside, after the other hooks have finished."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PipelineError):
            cause = cause.__cause__
        if cause is not None:
            raise cause


def _tags(run_params: dict[str, Any]) -> dict[str, str]:
    """The command line of Kedro as tags of the parent run."""
    names = ("env", "from_nodes", "to_nodes", "node_names", "tags", "runtime_params")
    asked = {name: run_params.get(name) for name in names}
    version = (
        run_params.get("save_version") or run_params.get("session_id") or run_params.get("run_id")
    )
    return {
        "kedro.version": str(version),
        **{f"kedro.{key}": without_secrets(str(value)) for key, value in asked.items() if value},
    }
