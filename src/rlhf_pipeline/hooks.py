"""Kedro hooks: parameters are checked before anything runs, stages are shown and tracked while they run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from rich.console import Console

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.model import BaseModelConfig
from rlhf_pipeline.config.preflight import check_root, preflight
from rlhf_pipeline.data.report import print_summary
from rlhf_pipeline.errors import Interrupted, PipelineError
from rlhf_pipeline.evaluation.report import print_table
from rlhf_pipeline.redaction import without_secrets
from rlhf_pipeline.stages.events import StageRun, Status, listening
from rlhf_pipeline.stages.forcing import forced_stages, forcing
from rlhf_pipeline.stages.launcher import free_port, gpu_count, process_count
from rlhf_pipeline.stages.progress import ProgressDisplay
from rlhf_pipeline.stages.trust import trusting
from rlhf_pipeline.tracking.runs import MlflowTracker
from rlhf_pipeline.tracking.store import tracking_uri


class PreflightHook:
    """Refuses parameters that cannot work before the first node runs."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Check the path that all others begin with, before the catalog is made of it."""
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


@contextmanager
def switches(parameters: dict[str, Any]) -> Iterator[None]:
    """Inside the block, what parameters switch on for one run: stages run again (`force`), and code that lies beside a model's
    weights may be executed (`base_model.trust_remote_code`)."""
    trusted = BaseModelConfig.model_validate(parameters["base_model"]).trust_remote_code
    with forcing(forced_stages(parameters.get("force"))), trusting(trusted):
        yield


class SwitchesHook:
    """Holds the switches for one run: a later one of the same process has its own."""

    def __init__(self) -> None:
        self._on = ExitStack()

    @hook_impl
    def before_pipeline_run(self, catalog: CatalogProtocol) -> None:
        """Switch them on."""
        self._on.enter_context(switches(catalog.load("parameters")))

    @hook_impl
    def after_pipeline_run(self) -> None:
        """Switch them off."""
        self._on.close()

    @hook_impl
    def on_pipeline_error(self) -> None:
        """Switch them off."""
        self._on.close()


class TrackingHook:
    """One MLflow run for each `kedro run`, with a child run for each stage that is launched."""

    def __init__(self) -> None:
        self._project = Path()
        self._tracker: MlflowTracker | None = None
        self._listening = ExitStack()

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Remember where the project is: its tracking database lies there."""
        self._project = Path(context.project_path)

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any]) -> None:
        """Start the parent run, and follow the stages."""
        names = run_params.get("pipeline_names") or ["__default__"]
        self._tracker = MlflowTracker(tracking_uri(self._project), self._project)
        self._tracker.start("+".join(names), _tags(run_params))
        self._listening.enter_context(listening(self._tracker))

    @hook_impl
    def before_node_run(self) -> None:
        """Send what the store could not take before: the registration looks for it there."""
        if self._tracker is not None:
            self._tracker.catch_up()

    @hook_impl
    def after_pipeline_run(self) -> None:
        """End the parent run."""
        self._end("FINISHED")

    @hook_impl
    def on_pipeline_error(self, error: Exception) -> None:
        """End the parent run with the truth."""
        self._end("KILLED" if isinstance(error, Interrupted) else "FAILED")

    def _end(self, status: Any) -> None:
        self._listening.close()
        if self._tracker is not None:
            self._tracker.end(status)
            self._tracker = None


class ErrorHook:
    """Shows the pipeline's own failures as they are: Kedro's catalog wraps them, and that would be printed with its stack."""

    @hook_impl(trylast=True)
    def on_pipeline_error(self, error: Exception) -> None:
        """Raise what is inside, after the other hooks have seen to their things."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PipelineError):
            cause = cause.__cause__
        if cause is not None:
            raise cause


class DataSummary:
    """Says what the data became, as soon as it is prepared."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def stage_started(self, run: StageRun) -> None:
        """Nothing to say yet."""

    def stage_metrics(self, run: StageRun, records: list[dict[str, Any]]) -> None:
        """Nothing to say yet."""

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        """Print the split's report in a few lines."""
        if run.stage == "split" and status == "FINISHED" and not run.cached:
            print_summary(json.loads((run.export / "report.json").read_text(encoding="utf-8")), self._console)


class ProgressHook:
    """Shows the stages while they run, and at the end what came out and where it lies."""

    def __init__(self) -> None:
        self._console = Console()
        self._listening = ExitStack()
        self._outputs: dict[str, Any] = {}

    @hook_impl
    def before_pipeline_run(self) -> None:
        """Follow the stages."""
        self._outputs = {}
        self._listening.enter_context(listening(ProgressDisplay(self._console), DataSummary(self._console)))

    @hook_impl
    def after_node_run(self, outputs: dict[str, Any]) -> None:
        """Remember what this run made: the catalog may have a newer registration by then, another run's."""
        self._outputs |= outputs

    @hook_impl
    def after_pipeline_run(self, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Print the comparison, the registered versions, and the places of all results of this run."""
        self._listening.close()
        results = {
            name: catalog.load(name) if isinstance(self._outputs[name], Path) else self._outputs[name]
            for name in sorted(pipeline.all_outputs())
        }
        for name in results:
            if name.endswith("evaluation"):
                print_table(json.loads((results[name] / "evaluation.json").read_text()), self._console)
        self._say("")
        for name, place in results.items():
            if isinstance(place, Path):
                self._say(f"{name:>15}  {place}")
        for name in results:
            if name.endswith("registration"):
                self._say("\n".join(_registration(results[name])))

    @hook_impl
    def on_pipeline_error(self) -> None:
        """Leave the terminal in order."""
        self._listening.close()

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def _registration(registration: dict[str, Any]) -> list[str]:
    """Who is who in the model registry, why the candidate was not promoted, and where MLflow shows both side by side."""
    aliases = ", ".join(f"{alias} = version {version}" for alias, version in sorted(registration["aliases"].items()))
    refusals = [f"{'':>15}  not promoted: {reason}" for reason in registration["refusals"]]
    compare = f"http://127.0.0.1:5000{registration['compare']}"
    return [f"{registration['model']:>15}  {aliases}", *refusals, f"{'compare':>15}  make ui, then {compare}"]


def _tags(run_params: dict[str, Any]) -> dict[str, str]:
    """What was asked of Kedro, as tags of the parent run."""
    asked = {
        key: run_params.get(key) for key in ("env", "from_nodes", "to_nodes", "node_names", "tags", "runtime_params")
    }
    version = run_params.get("save_version") or run_params.get("session_id") or run_params.get("run_id")
    return {
        "kedro.version": str(version),
        **{f"kedro.{key}": without_secrets(str(value)) for key, value in asked.items() if value},
    }
