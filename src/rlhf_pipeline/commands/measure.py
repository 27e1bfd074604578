"""`kedro rlhf plan --measure`: what each stage takes, forecast from a miniature of the pipeline."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
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
from rlhf_pipeline.config.training import SamplingConfig, SupervisedConfig, evaluation_steps
from rlhf_pipeline.kedro_run.artifacts import Ledger
from rlhf_pipeline.pipelines.table import RUN, policy_stages, stage_specs
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.runtime.metrics_file import read_json_lines
from rlhf_pipeline.runtime.usage import USAGE, Forecast, Usage, usage_of
from rlhf_pipeline.sizing.forecast import (
    Range,
    Timings,
    answering_range,
    lengths,
    line,
    peak_after,
    training_range,
)
from rlhf_pipeline.sizing.hardware import GIB
from rlhf_pipeline.stages.launch.resources import gpu_count

STEPS, ROLLOUTS = 8, 4
"""Steps of a short training: of one on prepared rows, and of one that samples answers."""
BATCHES, SHARES = (1, 4), (8, 2)
"""Batches of prompts that a stage answers in its two short runs, at most 1/8 and 1/2 of all."""
UNKNOWN = "tasks", "judge_split", "judge_model"
"""Stages of an evaluation that run in the miniature and are not forecast: how many rows they read
is known later."""


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
        finished, is_whole = finished_stages(ledger, pipeline)
        forecasts: list[Forecast] = []
        if not is_whole:
            with console.status("preparing models and data") as status:
                given = ledger, configuration, project, pipeline, ".measure", status, finished
                miniature = Miniature(*given)
                found = measured(miniature)
            forecasts = [each for each in found if each.stage not in finished]
            for each in forecasts:
                each.write(ledger.workspace)
            shutil.rmtree(miniature.root)
        show(forecasts, finished, ledger, pipeline, console)


def measured(miniature: Miniature) -> list[Forecast]:
    """Run the miniature twice, and forecast what ran."""
    miniature.prepare()
    shorts: dict[str, list[Short]] = {}
    params = [short_run(miniature, number) for number in range(2)]
    for number, given in enumerate(params if params[0] != params[1] else params[:1], start=1):
        miniature.finish(miniature.start(given), f"short run {number}")
        for stage, short in _new(miniature, shorts):
            shorts.setdefault(stage, []).append(short)
    return [*forecast(miniature, shorts)]


def finished_stages(ledger: Ledger, pipeline: str) -> tuple[dict[str, list[Manifest]], bool]:
    """The results of the stages of a pipeline that are finished here, and whether all are."""
    rows = planned_rows(pipelines[pipeline], ledger.catalog)
    planned = RUN["stages"].stages.values()
    open_ones = {each.run.stage for each in planned if each.state != "finished"}
    found: dict[str, list[Manifest]] = {}
    for each in planned:
        if each.run.stage not in open_ones:
            found.setdefault(each.run.stage, []).append(Manifest.read(each.run.export))
    always = {node.name for node in pipelines[pipeline].nodes} - stage_specs().keys()
    waiting = (row for row in rows if row.state not in ("finished", "skip"))
    return found, all(row.stage in always for row in waiting)


def short_run(miniature: Miniature, number: int) -> dict[str, Any]:
    """The parameters of the first or the second short run of all stages: 0 or 1."""
    params: dict[str, Any] = {}
    for stage in miniature.stages:
        block = miniature.blocks[stage]
        params |= dict(miniature.short(stage, *short_steps(block)))
        params[f"{stage}.evaluations"] = 1
        if isinstance(block, PPOConfig) and number == 0:
            limit = max(1, block.sampling.max_response_tokens // 2)
            buffer = block.overlong_buffer if block.overlong_penalty else 0
            params[f"{stage}.sampling.max_response_tokens"] = max(limit, buffer)
        if isinstance(block, SampledConfig):
            wanted, sample = sampled_prompts(block, miniature), block.sample
            few = few_prompts(miniature, number, wanted, sample.sampling, sample.n)
            steps = (3, 6)[number]  # which need a batch each
            asked = max(few, steps * vars(block)["batch_size"])
            params[f"{stage}.sample.prompts"] = min(asked, wanted)
    if not any(name.startswith("evaluate") for name in miniature.nodes):
        return params
    evaluate = miniature.load("params:evaluate")
    params["evaluate.prompts"] = few_prompts(
        miniature,
        number,
        evaluation_prompts(miniature),
        evaluate.sampling,
        evaluate.answers_per_prompt,
    )
    if evaluate.tasks is not None:
        params["evaluate.tasks.limit"] = 2
    if evaluate.judge_model is not None:
        params["evaluate.judge_model.epochs"] = 0.01
    return params


def short_steps(block: Any) -> tuple[int, int]:
    """The steps of a short training, and those between two of its checkpoints."""
    steps = ROLLOUTS if isinstance(block, PPOConfig) else STEPS
    return steps, steps // 2


def few_prompts(
    miniature: Miniature, number: int, wanted: int, sampling: SamplingConfig, answers: int
) -> int:
    """The prompts of which a short run samples some answers each, where a run has `wanted`."""
    batch = max(1, sampling.batch_size_per_gpu * miniature.ranks // answers)
    few = min(BATCHES[number] * batch, wanted // SHARES[number])
    return max(2, min(wanted, max(few, miniature.ranks)))


def evaluation_prompts(miniature: Miniature) -> int:
    """The prompts of an evaluation."""
    wanted = miniature.load("params:evaluate").prompts
    return int(min(wanted, miniature.files["evaluation/test.arrow"]["rows"]))


def sampled_prompts(block: SampledConfig, miniature: Miniature) -> int:
    """The prompts that a policy answers in a round to train on the answers."""
    rows = int(miniature.files["ppo/train.arrow"]["rows"])
    return min(block.sample.prompts or rows, rows)


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
    """What each stage will take that ran in the miniature."""
    for stage, seen in shorts.items():
        if stage in UNKNOWN:
            continue
        *_, last = seen
        block = miniature.blocks.get(stage)
        peak = float(max(each.usage.peak for each in seen))
        if isinstance(block, SupervisedConfig | PPOConfig):
            seconds = training(block, seen, shorts, miniature)
            if isinstance(block, PPOConfig) and gpu_count() == 0:  # a GPU's was not measured
                peak = peak_after(peak, ROLLOUTS, block.steps)
        else:
            asked = prompts_of(seen, miniature)
            seconds = answering(seen, asked, sampled_tokens(shorts), miniature)
            # Memory rises with the prompts until a batch is full, which the short runs may not
            # show: the middle of their peak, and of a rise up to the last prompt.
            grown = line(asked.short, [each.usage.peak for each in seen], asked.wanted)
            peak = (peak + max(peak, grown)) / 2
        config = real_config(last.made.config, miniature)
        yield Forecast(stage, config, last.made.ranks, seconds, peak)


class Asked(NamedTuple):
    """The prompts that a stage answers, in its short runs and later."""

    short: list[int]
    wanted: int
    file: str
    """The file of the split with the prompts."""
    limit: int
    """The most tokens of an answer."""


def prompts_of(seen: Sequence[Short], miniature: Miniature) -> Asked:
    """The prompts of a stage that answers."""
    (name,) = seen[-1].made.config.keys() - {"candidate", "table"}
    given = [each.made.config[name] for each in seen]
    block = miniature.blocks.get(name.removesuffix(".sample"))
    if isinstance(block, SampledConfig):
        wanted, file = sampled_prompts(block, miniature), "ppo/train.arrow"
    else:
        wanted, file = evaluation_prompts(miniature), "evaluation/test.arrow"
    limit = given[-1]["sampling"]["max_response_tokens"]
    return Asked([each["prompts"] for each in given], wanted, file, limit)


def training(
    block: SupervisedConfig | PPOConfig, seen: list[Short],
    shorts: Mapping[str, list[Short]], miniature: Miniature,
) -> Range:  # fmt: skip
    """Seconds of a training with the project's parameters."""
    _, saved_every = short_steps(block)
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
            rows = share * sampled_prompts(block, miniature)
        else:
            rows = miniature.rows(seen[-1].made.stage)
        steps = max(1, int(block.epochs * rows) // block.batch_size)
    evaluated = evaluation_steps(steps, block.evaluations)
    saved = sum(
        block.checkpoint_due(step, last=steps, evaluated=step in evaluated)
        for step in range(1, steps + 1)
    )
    prompt = mean_tokens(miniature, "ppo/train.arrow", "prompt_ids")
    return training_range(timings, steps, len(evaluated), saved, answers, prompt)


def answering(seen: list[Short], asked: Asked, tokens: float, miniature: Miniature) -> Range:
    """Seconds of a stage that answers all prompts of the project.

    `tokens` is the mean length of the answers in the miniature.
    """
    answers = expected_answers(miniature, tokens, asked.limit)
    prompt = mean_tokens(miniature, asked.file, "prompt_ids")
    least, expected, most = ((prompt + each) / (prompt + tokens) for each in answers)
    took = [each.usage.seconds for each in seen]
    return answering_range(asked.short, took, asked.wanted, (least, expected, most))


def expected_answers(miniature: Miniature, tokens: float, limit: int) -> Range:
    """Lengths of the answers to come, of a policy whose answers have `tokens` in the miniature.

    If SFT is short there, its policy does not end its answers yet; a longer SFT imitates the
    lengths of its rows.
    """
    if "sft" in miniature.stages:
        tokens = min(float(limit), mean_tokens(miniature, "sft/train.arrow", "response_ids"))
    return lengths(tokens, limit)


def mean_tokens(miniature: Miniature, file: str, column: str) -> float:
    """Mean tokens of a column in a file of the split; 0 for a file without rows."""
    found = miniature.files[file]
    total = found["tokens"][column]["total"] if found["rows"] else 0
    return float(total / max(1, found["rows"]))


def sampled_tokens(shorts: Mapping[str, list[Short]]) -> float:
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
    for name in short_run(miniature, 0):
        for block in (each for each in changed if name.startswith(f"{each}.")):
            inside, given = changed[block], miniature.load(f"params:{block.partition('.')[0]}")
            *folders, last = name.removeprefix(f"{block}.").split(".")
            for part in (*block.split(".")[1:], *folders):
                given = getattr(given, part)
            for folder in folders:
                inside = inside.get(folder, {})
            if last in inside:
                inside[last] = getattr(given, last)
    return dict(changed)


def show(
    forecasts: Sequence[Forecast], finished: Mapping[str, list[Manifest]], ledger: Ledger,
    pipeline: str, console: Console,
) -> None:  # fmt: skip
    """Print a row for each stage, and their sum; a policy in rounds runs its stages in each."""
    rounds = 1
    for node in pipelines[pipeline].nodes:
        if node.name in policy_stages():
            rounds = getattr(ledger.catalog.load(f"params:{node.name}"), "rounds", 1)
    in_rounds = {"sample", *policy_stages()}
    table = plain_table("stage", numbers=["time", "from", "to", "GiB of a rank"])
    total = [0.0, 0.0, 0.0]
    for each in forecasts:
        times = rounds if each.stage in in_rounds else 1
        least, expected, most = seconds = [times * one for one in each.seconds]
        total = [one + other for one, other in zip(total, seconds, strict=True)]
        size = f"{each.peak / GIB:.2f}"
        table.add_row(each.stage, *map(duration, (expected, least, most)), size)
    if forecasts:
        least, expected, most = total
        table.add_row("[bold]all of these", *map(duration, (expected, least, most)), "")
        console.print(table)
    evaluate = ledger.catalog.load("params:evaluate")
    left_out = [each for each in UNKNOWN if getattr(evaluate, each, None) is not None]
    if forecasts and left_out:
        console.print(f"not forecast: {', '.join(left_out)}")
    for stage, made in finished.items():
        known = [usage_of(ledger.workspace, each) for each in made]
        took = sum(each.seconds for each in known if each is not None)
        console.print(f"{stage}: finished" + (f", took {duration(took)}" if took else ""))


def duration(seconds: float) -> str:
    """A time for people: 42 s, 3 min, 1.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
