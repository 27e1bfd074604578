"""`kedro rlhf evaluate`: any models answer the same prompts, and are judged and compared."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, get_args

import click
import yaml
from rich.console import Console

from rlhf_pipeline.commands.command import ENV, Command
from rlhf_pipeline.config.base_model import positions, saved_config
from rlhf_pipeline.config.block import validated
from rlhf_pipeline.config.evaluate import CHAMPION, EvaluateConfig
from rlhf_pipeline.config.rewards import Agreement
from rlhf_pipeline.config.split import BlendedSourceConfig, SplitConfig
from rlhf_pipeline.data.sources.registry import first_rows
from rlhf_pipeline.data.split_report import require_true_answers
from rlhf_pipeline.errors import ArtifactError, ConfigError, DataError, Interrupted
from rlhf_pipeline.kedro_run.artifacts import Ledger
from rlhf_pipeline.kedro_run.dry_run import Rows, code_faults, scorer_faults
from rlhf_pipeline.kedro_run.faults import judge_faults, length_faults, refuse
from rlhf_pipeline.kedro_run.results import print_results
from rlhf_pipeline.pipelines.evaluate import evaluate_models
from rlhf_pipeline.pipelines.preparation import read_sources, split
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.stages.cache.workspace import DOWNLOADS
from rlhf_pipeline.stages.job import Stages, Status
from rlhf_pipeline.tracking.mirror import MlflowTracker
from rlhf_pipeline.tracking.registration import register_evaluated
from rlhf_pipeline.tracking.store import TOKENS, find_champion, tracking_uri
from rlhf_pipeline.verdict.page import evaluation_page


@click.command(cls=Command)
@click.argument("models", nargs=-1, required=True)
@click.option(
    "--prompts",
    help="File of prompts (JSONL, JSON, CSV or Parquet), or a source as YAML: {path: FILE, "
    "columns: {prompt: question, reference: answer}}.  [default: the test prompts of the newest "
    "split]",
)
@click.option(
    "--judge",
    "judges",
    multiple=True,
    help="What judges the answers. FILE.py:FUNCTION, the folder of a reward model, or for true "
    "answers one of exact, final_answer, contains, last_number, math. Also YAML, as in "
    "evaluate.judges. Repeatable; the first decides.  [default: evaluate.judges]",
)
@click.option(
    "--register",
    "registers",
    is_flag=True,
    help="Register the second model as the candidate against the first, and apply the gate.",
)
def evaluate(
    ledger: Ledger, console: Console, models: Sequence[str], prompts: str | None,
    judges: Sequence[str], registers: bool,
) -> None:  # fmt: skip
    """Compare the answers of MODELS to the same prompts; the first model is the baseline.

    MODELS are versions or aliases of the registered model, folders of artifacts, folders of
    transformers, or ids on the Hugging Face hub. Each model answers in its own tokens
    and chat template, and judges read the texts. A repeated command finds what is finished.
    """
    if len(models) < 2:
        raise ConfigError(f"MODELS: found {models[0]} alone, expected two or more")
    catalog, project = ledger.catalog, ledger.project
    config = evaluation_config(catalog.load("params:evaluate"), judges)
    given, seed = catalog.load("params:split"), catalog.load("params:seed")
    tests = (source_of(prompts),) if prompts else given.sources
    refuse(judge_faults(config.judges, "evaluate.judges"))
    judged = {f"evaluate.judges.{index}": judge for index, judge in enumerate(config.judges)}
    rows = first_prompts(tests[0], given.max_bad_fraction) if prompts else ()
    refuse(scorer_faults(judged, rows, dict(enumerate(tests)), {}, ledger.workspace))
    refuse(code_faults({"evaluate": config}, ledger.workspace))
    title = f"evaluate {' '.join(models)}"
    tracker = MlflowTracker(tracking_uri(project), project, title, {}, {})
    ledger = replace(ledger, listeners=(tracker,))
    with _tracked(tracker), ledger.stages() as stages:
        if prompts:  # its faults come before the import of a large model
            changes = {"sources": tests, "pretraining": None, "test_fraction": 0.0}
            given = given.model_copy(update=changes)
            read_sources("source", given.readings(), given, seed, stages)
        folders = dict(zip(labels(models), map(ledger.language_model, models), strict=True))
        baseline, candidate, *_ = folders.values()
        champion, gate = None, catalog.load("params:register")
        if registers:
            downloads = ledger.workspace / DOWNLOADS
            champion = find_champion(gate.model, candidate, project, downloads)
        if champion is not None and champion.folder is not None:
            folders[CHAMPION] = champion.folder
        for folder in folders.values():
            refuse(length_faults(positions(saved_config(folder)), given, [], config))
        asked = tokenized(folders, given, seed, stages) if prompts else published(folders, ledger)
        for folder in asked.values():
            require_true_answers(folder.parent, [], config.judges)
        evaluation = evaluate_models(folders, asked, config, seed, stages).resolve()
        results: dict[str, Any] = {"evaluation": evaluation}
        if registers:
            answered = evaluation if CHAMPION in folders else None
            registration = register_evaluated(
                baseline, candidate, evaluation, champion, answered, gate, tests, project
            )
            results["registration"] = asdict(registration)
        text = evaluation_page(
            evaluation, folders.values(), results.get("registration"), ledger.workspace
        )
        results["evaluation_page"] = evaluation.with_name(f"{evaluation.name}.html")
        write_atomically(results["evaluation_page"], text)
        tracker.log_page(Manifest.read(evaluation).fingerprint, text)
    print_results(results, console, click.get_current_context().meta[ENV])


def first_prompts(source: BlendedSourceConfig, bad: float) -> Rows:
    """The first rows of a source, some of which may be bad. Raises DataError for its file."""
    try:
        return [(source, first_rows(source.reading(), bad))]
    except DataError as error:
        found, _, fix = error.message.partition("Fix: ")
        if "column" in found:
            fix = "--prompts '{path: FILE, columns: {prompt: COLUMN, reference: COLUMN}}'"
        raise DataError(f"--prompts: {found}Fix: {fix}") from None


@contextmanager
def _tracked(tracker: MlflowTracker) -> Iterator[None]:
    status: Status = "FAILED"
    try:
        yield
        status = "FINISHED"
    except (Interrupted, KeyboardInterrupt):
        status = "KILLED"
        raise
    finally:
        tracker.end(status)


def evaluation_config(given: EvaluateConfig, judges: Sequence[str]) -> EvaluateConfig:
    """The parameters `evaluate` with these judges; all models draw equally many answers.

    Raises ConfigError if there is no judge, or a judge is wrong.
    """
    values = given.model_dump(mode="json") | {"best_of_n": 0, "tasks": None, "judge_model": None}
    values["answers_per_prompt"] = given.baseline_draws
    values["judges"] = [judge_of(each) for each in judges] or values["judges"]
    if not values["judges"]:
        raise ConfigError(
            "--judge: found none, expected at least one, because evaluate.judges is empty. Fix: "
            "add --judge FILE.py:FUNCTION, or another judge"
        )
    config, faults = validated("evaluate", EvaluateConfig, values)
    refuse(faults)
    assert config is not None, "it has no faults"
    return config


def judge_of(text: str) -> Any:
    """An item of `evaluate.judges` from the value of --judge."""
    if text in get_args(Agreement):
        return {"reference": text}
    if text.startswith("{"):
        return _mapping("--judge", text)
    return {"model": text, "retokenize": True} if Path(text).is_dir() else text


def source_of(text: str) -> BlendedSourceConfig:
    """The source of the prompts from the value of --prompts: all of it is the test."""
    values = _mapping("--prompts", text) if text.startswith("{") else {"path": text}
    named = {"name": "files", "phases": ["test"]} | values
    source, faults = validated("--prompts", BlendedSourceConfig, named)
    refuse(faults)
    assert source is not None, "it has no faults"
    return source


def _mapping(option: str, text: str) -> dict[str, Any]:
    try:
        return dict(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{option}: found {text}, expected a mapping in YAML: {error}") from None


def labels(models: Sequence[str]) -> list[str]:
    """A short name for each model, which none of the others has.

    The evaluation has names of its own for a reward model, and for the champion of the registry.
    """
    found, reserved = list[str](), {"reward", CHAMPION} - {*models}
    for model in models:
        name = re.sub(r"[^\w.-]", "-", Path(model).name) or "model"
        names = chain([name], (f"{name}-{number}" for number in count(2)))
        found.append(next(each for each in names if each not in (*found, *reserved)))
    return found


def published(models: Mapping[str, Path], ledger: Ledger) -> dict[str, Path]:
    """The test prompts of the newest published split, for each model.

    Raises ArtifactError if there is none, or it has other tokens than a model.
    """
    versions = ledger.datasets["split"].versions()
    if not versions:
        raise ArtifactError("--prompts: found none, and no published split. Fix: name a file")
    folder = versions[-1] / "evaluation"
    for name, model in models.items():
        if tokens_of(model) != tokens_of(folder):
            raise ArtifactError(
                f"--prompts: found none, and the newest split has other tokens than {name}. "
                "Fix: name a file"
            )
    return dict.fromkeys(models, folder)


def tokenized(
    models: Mapping[str, Path], config: SplitConfig, seed: int, stages: Stages
) -> dict[str, Path]:
    """The prompts in the tokens of each model; models with equal tokens share a folder."""
    by_tokens: dict[str, Path] = {}
    for model in models.values():
        tokens = tokens_of(model)
        if tokens not in by_tokens:
            by_tokens[tokens] = split(model, config, None, seed, stages) / "evaluation"
    return {name: by_tokens[tokens_of(model)] for name, model in models.items()}


def tokens_of(folder: Path) -> str:
    """The token contract of an artifact, to compare."""
    return (folder / TOKENS).read_text(encoding="utf-8")
