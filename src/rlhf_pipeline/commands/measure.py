"""`kedro rlhf plan --measure`: what each stage takes, forecast from a miniature of the pipeline."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from kedro.framework.project import pipelines
from rich.console import Console

from rlhf_pipeline.commands.command import opened, plain_table
from rlhf_pipeline.commands.miniature import Miniature
from rlhf_pipeline.commands.status import planned_rows
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.sample import SampledConfig
from rlhf_pipeline.config.training import SupervisedConfig
from rlhf_pipeline.kedro_run.artifacts import Ledger
from rlhf_pipeline.pipelines.table import RUN
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.runtime.metrics_file import read_json_lines
from rlhf_pipeline.runtime.usage import USAGE, Forecast, Usage, usage_of
from rlhf_pipeline.sizing.forecast import (
    Range,
    Timings,
    answering_range,
    lengths,
    training_range,
    with_drift,
)
from rlhf_pipeline.sizing.hardware import GIB

STEPS, ROLLOUTS = 8, 4
"""Steps of a short training: of one on prepared rows, and of one that samples answers."""
SHARES = 8, 2
"""Which part of the prompts of a stage that answers the two short runs have: 1/8 and 1/2."""


class Short(NamedTuple):
    """A short run of a stage."""

    usage: Usage
    made: Manifest
    records: list[dict[str, Any]]


def measure(
    project: Path, configuration: Mapping[str, Any], pipeline: str, console: Console
) -> None:
    """Run a pipeline in miniature, to its end, and show what the pipeline itself will take."""
    with opened(project, configuration, {}) as (_, ledger):
        finished = finished_stages(ledger, pipeline)
        miniature = Miniature(ledger, configuration, project, pipeline, "measure", finished)
        with console.status("preparing models and data"):
            miniature.prepare()
        shorts: dict[str, list[Short]] = {}
        for number, what in enumerate(("a first time", "with other lengths"), start=1):
            with console.status(f"running a few steps of each stage, {what}"):
                miniature.finish(miniature.start(short_run(miniature, number)), "plan --measure")
            for stage, short in _new(miniature, shorts):
                shorts.setdefault(stage, []).append(short)
        forecasts = [*forecast(miniature, shorts)]
        for each in forecasts:
            each.write(ledger.workspace)
        show(forecasts, finished, ledger, miniature, console)
    shutil.rmtree(miniature.root)


def finished_stages(ledger: Ledger, pipeline: str) -> dict[str, list[Manifest]]:
    """The stages of a pipeline whose runs are all finished here, with their results."""
    planned_rows(pipelines[pipeline], ledger.catalog)
    planned = RUN["stages"].stages.values()
    open_ones = {each.run.stage for each in planned if each.state != "finished"}
    found: dict[str, list[Manifest]] = {}
    for each in planned:
        if each.run.stage not in open_ones:
            found.setdefault(each.run.stage, []).append(Manifest.read(each.run.export))
    return found


def short_run(miniature: Miniature, number: int) -> dict[str, Any]:
    """The parameters of the first or second short run of all stages."""
    params: dict[str, Any] = {}
    for stage in miniature.stages:
        block = miniature.blocks[stage]
        steps = ROLLOUTS if isinstance(block, PPOConfig) else STEPS
        params |= dict(miniature.short(stage, steps, steps // 2)) | {f"{stage}.evaluations": 1}
        if isinstance(block, PPOConfig) and number == 1:
            limit = max(1, block.sampling.max_response_tokens // 2)
            buffer = block.overlong_buffer if block.overlong_penalty else 0
            params[f"{stage}.sampling.max_response_tokens"] = max(limit, buffer)
        if isinstance(block, SampledConfig):
            wanted = wanted_prompts(block, miniature)
            params[f"{stage}.sample.prompts"] = _share(wanted, number)
    params["evaluate.prompts"] = _share(test_prompts(miniature), number)
    if miniature.load("params:evaluate").tasks is not None:
        params["evaluate.tasks.limit"] = 2
    return params


def test_prompts(miniature: Miniature) -> int:
    """The prompts of an evaluation."""
    wanted = miniature.load("params:evaluate").prompts
    return int(min(wanted, miniature.files["evaluation/test.arrow"]["rows"]))


def _share(prompts: int, number: int) -> int:
    return min(prompts, max(8 * number, prompts // SHARES[number - 1]))


def _new(miniature: Miniature, known: Mapping[str, list[Short]]) -> Iterator[tuple[str, Short]]:
    """The stages that ran since `known`."""
    seen = {each.made.fingerprint for shorts in known.values() for each in shorts}
    files = miniature.workspace.glob(f"*/*/{USAGE}")
    for file in sorted(files, key=lambda file: file.stat().st_mtime_ns):
        made = Manifest.read(file.parent / "export")
        if not file.parents[1].is_symlink() and made.fingerprint not in seen:
            records = read_json_lines(file.parent / "metrics.jsonl")
            yield made.stage, Short(Usage.read(file.parent), made, records)


def forecast(miniature: Miniature, shorts: Mapping[str, list[Short]]) -> Iterator[Forecast]:
    """What each stage will take that ran in the miniature.

    The benchmarks of `evaluate.tasks` are not forecast: nobody here knows how many rows they have.
    """
    own = sampled_tokens(miniature, shorts)
    for stage, seen in shorts.items():
        if stage == "tasks":
            continue
        *_, last = seen
        block = miniature.blocks.get(stage)
        if isinstance(block, SupervisedConfig | PPOConfig):
            seconds = training(block, seen, shorts, miniature)
        elif len(seen) > 1:
            seconds = answering(seen, own, miniature)
        else:  # it ran as a whole
            seconds = with_drift([last.usage.seconds] * 3, 0.0)
        peaks = sorted(float(each.usage.peak) for each in seen)
        config = real_config(last.made.config, miniature)
        yield Forecast(stage, config, last.made.ranks, seconds, (peaks[0], peaks[-1], peaks[-1]))


def training(
    block: SupervisedConfig | PPOConfig, seen: list[Short],
    shorts: Mapping[str, list[Short]], miniature: Miniature,
) -> Range:  # fmt: skip
    """Seconds of a training with the project's parameters."""
    saved_every = (ROLLOUTS if isinstance(block, PPOConfig) else STEPS) // 2
    timings = [Timings.of(each.records, each.usage.seconds, saved_every) for each in seen]
    answers: Range = (0.0, 0.0, 0.0)
    if isinstance(block, PPOConfig):
        steps = block.steps
        answers = expected_answers(
            miniature, timings[-1].tokens or 0.0, block.sampling.max_response_tokens
        )
    else:
        timings = timings[-1:]  # those of rejection sampling have other numbers of steps
        if isinstance(block, SampledConfig):
            share = 1 - shorts["sample"][-1].made.metrics["sample/without_row"]
            rows = share * wanted_prompts(block, miniature)
        else:
            rows = miniature.rows(seen[-1].made.stage)
        steps = max(1, int(block.epochs * rows) // block.batch_size)
    at_evaluations = block.evaluations * block.checkpoint_at_evaluations
    saved = at_evaluations + steps // (block.checkpoint_every or steps + 1)
    return training_range(timings, steps, block.evaluations, saved, answers)


def answering(seen: list[Short], tokens: float, miniature: Miniature) -> Range:
    """Seconds of a stage that answers all prompts of the project."""
    (name,) = seen[-1].made.config.keys() - {"candidate", "table"}
    asked = [each.made.config[name]["prompts"] for each in seen]
    if name == "evaluate":
        wanted, limit = test_prompts(miniature), seen[-1].made.config[name]["sampling"]
    else:
        block = miniature.blocks[name.removesuffix(".sample")]
        assert isinstance(block, SampledConfig), name
        wanted, limit = wanted_prompts(block, miniature), seen[-1].made.config[name]["sampling"]
    answers = expected_answers(miniature, tokens, limit["max_response_tokens"])
    prompt = mean_tokens(miniature, "evaluation/test.arrow", "prompt_ids")
    least, expected, most = ((prompt + each) / (prompt + tokens) for each in answers)
    took = [each.usage.seconds for each in seen]
    return answering_range(asked, took, wanted, (least, expected, most))


def wanted_prompts(block: SampledConfig, miniature: Miniature) -> int:
    """The prompts that a policy answers in a round to train on the answers."""
    return block.sample.prompts or int(miniature.files["ppo/train.arrow"]["rows"])


def expected_answers(miniature: Miniature, tokens: float, limit: int) -> Range:
    """Lengths of the answers to come, of a policy whose answers have `tokens` in the miniature.

    If SFT is short there, its policy does not end its answers yet; a longer SFT imitates the
    lengths of its rows.
    """
    if "sft" in miniature.stages:
        tokens = min(float(limit), mean_tokens(miniature, "sft/train.arrow", "response_ids"))
    return lengths(tokens, limit)


def mean_tokens(miniature: Miniature, file: str, column: str) -> float:
    """Mean tokens of a column in a file of the split."""
    found = miniature.files[file]
    return float(found["tokens"][column]["total"] / max(1, found["rows"]))


def sampled_tokens(miniature: Miniature, shorts: Mapping[str, list[Short]]) -> float:
    """Mean length of the answers in the evaluation of the miniature."""
    found = [
        value
        for stage, seen in shorts.items()
        for name, value in seen[-1].made.metrics.items()
        if stage.startswith("evaluate") and name.endswith("/response_tokens")
    ]
    return mean(found) if found else 0.0


def real_config(config: Mapping[str, Any], miniature: Miniature) -> dict[str, Any]:
    """The parameters of a stage, with those of the project for those of the short run."""
    changed = json.loads(json.dumps(config))
    for name in short_run(miniature, 1).keys() | short_run(miniature, 2).keys():
        for block in (each for each in changed if name.startswith(f"{each}.")):
            *folders, last = name.removeprefix(f"{block}.").split(".")
            inside, given = changed[block], miniature.load(f"params:{block.partition('.')[0]}")
            for part in block.split(".")[1:]:
                given = getattr(given, part)
            for folder in folders:
                inside, given = inside[folder], getattr(given, folder)
            if last in inside:
                inside[last] = getattr(given, last)
    return dict(changed)


def show(
    forecasts: list[Forecast], finished: Mapping[str, list[Manifest]], ledger: Ledger,
    miniature: Miniature, console: Console,
) -> None:  # fmt: skip
    """Print a row for each stage, and their sum."""
    table = plain_table("stage", numbers=["time", "from", "to", "GiB of a rank"])
    total, sampled = [0.0, 0.0, 0.0], miniature.blocks.values()
    rounds = {"sample": max(getattr(each, "rounds", 1) for each in sampled)}
    rounds |= {name: getattr(each, "rounds", 1) for name, each in miniature.blocks.items()}
    for each in forecasts:
        times = rounds.get(each.stage, 1)
        least, expected, most = seconds = [times * one for one in each.seconds]
        total = [one + other for one, other in zip(total, seconds, strict=True)]
        size = f"{each.peak[-1] / GIB:.2f}"
        table.add_row(each.stage, *map(duration, (expected, least, most)), size)
    least, expected, most = total
    table.add_row("[bold]all", *map(duration, (expected, least, most)), "")
    console.print(table)
    for stage, made in finished.items():
        known = [usage_of(ledger.workspace, each) for each in made]
        took = sum(each.seconds for each in known if each is not None)
        console.print(f"{stage}: finished" + (f", took {duration(took)}" if took else ""))


def duration(seconds: float) -> str:
    """A time for people: 42 s, 3 min, 1.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
