"""What can be tried out in seconds, before the first stage: the first rows are read, each function
of a reward or judge is called once, other code of the user is imported, and a teacher's tokenizer
and names of layers are looked at."""

import json
import logging
import os
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from tempfile import TemporaryFile
from typing import Any

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.config.doors import at_doors, source_file
from rlhf_pipeline.config.episodes import EpisodesConfig
from rlhf_pipeline.config.evaluate import TasksConfig
from rlhf_pipeline.config.rewards import CallableReward, CodeReward, reads_references
from rlhf_pipeline.config.sample import SampledConfig
from rlhf_pipeline.config.split import BlendedSourceConfig, SourceConfig
from rlhf_pipeline.config.stages import prompt_policies
from rlhf_pipeline.data.records import Example
from rlhf_pipeline.data.sources.registry import FirstRows, carried, first_rows
from rlhf_pipeline.errors import ConfigError, StageError, about
from rlhf_pipeline.kedro_run.faults import own_bases, refuse
from rlhf_pipeline.pipelines.table import blocks_of
from rlhf_pipeline.runtime import sandbox
from rlhf_pipeline.runtime.job import DRY_RUNS, as_json
from rlhf_pipeline.runtime.manifest import json_digest

logger = logging.getLogger(__name__)

PROGRAM = "rlhf_pipeline.scoring.dry_run"
LOAD_S, CALL_S = 120.0, 60.0
"""Longest time for imports, and for a function without `timeout_s`."""
RESPONSES = ("The answer is 5.", "An example of an answer.", "")
"""What functions score: a policy may also end at once."""
CAREFUL, FEWEST = "evaluate.judge_model", 20
"""The place of a second reward model, and the fewest comparisons that it must have."""
OF_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
"""Variables that a function may expect, because ranks have them."""

Rows = Sequence[tuple[BlendedSourceConfig, FirstRows]]
"""Sources with their first rows."""


def dry_run(blocks: Mapping[str, Any], nodes: Collection[str], workspace: Path, ranks: int) -> None:
    """Look at the first rows, call each function of the nodes once, and look at models.

    Raises DataError for files, and ConfigError with one line for each other fault.
    """
    split, evaluate, policies = blocks["split"], blocks["evaluate"], prompt_policies(blocks)
    is_judged = "evaluate" in blocks_of(nodes)

    def read(place: str, source: BlendedSourceConfig) -> FirstRows:
        with about(place):
            return first_rows(source.reading(), split.max_bad_fraction)

    sources = enumerate(split.sources if "split" in nodes else ())
    rows = [(source, read(f"split.sources.{index}", source)) for index, source in sources]
    for_ppo = [(source, each) for source, each in rows if source.may_serve("ppo")]
    every = dict(enumerate(split.sources))
    judge_too = evaluate.rewards_judge(blocks["reward_model"])
    rated = {index: one for index, one in every.items() if judge_too or one.may_serve("ppo")}
    rewards = {
        f"{policy.sampler}.rewards.{index}": reward
        for policy in policies
        if policy.stage in nodes
        for index, reward in enumerate(policy.rewards)
    }
    samples = {one.sampler: one.sample for one in policies if isinstance(one, SampledConfig)}
    faults = [
        *code_faults({**blocks, **samples}, workspace),
        *scorer_faults(rewards, for_ppo, rated, blocks, workspace),
        *model_faults(blocks, nodes, workspace),
    ]
    playing = {policy.sampler: policy.episodes for policy in policies if policy.stage in nodes}
    playing |= {"evaluate": evaluate.episodes} if is_judged else {}
    tasks = [row for _, first in for_ppo for row in first.values()]
    for place, episodes in playing.items():
        if episodes.has_turns:
            faults += episode_faults(place, episodes, tasks, workspace)
    if is_judged:
        judges = {f"evaluate.judges.{index}": one for index, one in enumerate(evaluate.judges)}
        judging = [evaluate.with_episodes_of(one) for one in policies if one.stage in nodes]
        playing = next((one for one in judging if one.has_turns), evaluate)
        own = {**blocks, "evaluate": playing}
        faults += scorer_faults(judges, rows, every, own, workspace)
        judge = evaluate.judge_model
        if judge is not None and judge.path is not None:
            faults += careful_faults(read(CAREFUL, judge.source), ranks)
        if evaluate.tasks is not None:
            faults += task_faults(evaluate.tasks, workspace)
    refuse(faults)


def careful_faults(rows: FirstRows, ranks: int) -> Iterator[str]:
    """Comparisons for a second reward model that are too few, or no comparisons."""
    prompts, fewest = len({row.prompt for row in rows.values()}), max(FEWEST, 5 * ranks)
    if any(row.rejected is None for row in rows.values()):
        yield (
            f"{CAREFUL}.path: found one answer in a row, expected chosen and rejected in each. "
            f"Fix: name them in {CAREFUL}.columns"
        )
    elif rows.is_whole and prompts < fewest:
        yield (
            f"{CAREFUL}.path: found comparisons of {prompts} prompts, expected at least "
            f"{fewest}, for five models in turn are measured on a fifth by all {ranks} ranks. "
            f"Fix: add comparisons, or set {CAREFUL}.held_back instead"
        )


def scorer_faults(
    scorers: Mapping[str, Any], rows: Rows, sources: Mapping[int, SourceConfig],
    blocks: Mapping[str, Any], workspace: Path,
) -> Iterator[str]:  # fmt: skip
    """What is wrong with rewards or judges, by place: true answers that none of the first rows has,
    the sandbox of programs, and functions, each of which is called once.

    No function is called on made-up data: without rows, or true answers, it is only imported.
    `sources` have the columns that functions ask for, and `blocks` the responses to a prompt.
    """
    known = [row for _, first in rows for row in first.values()]
    with_answers = [row for row in known if row.reference is not None]
    # Rows of another form may follow.
    lacks_answers = rows and not with_answers and all(first.is_uniform for _, first in rows)
    chosen = [*islice(cycle(with_answers or known), len(RESPONSES))]
    further = [json.loads(row.extra or "{}") for row in chosen]
    columns = {name: [row.get(name) for row in further] for row in further for name in row}
    columns |= {"references": [row.reference for row in with_answers and chosen]}
    call = [row.messages() for row in chosen], RESPONSES, columns
    carries = {f"split.sources.{index}": carried(one) for index, one in sources.items()}
    for place, scorer in scorers.items():
        if lacks_answers and reads_references(scorer):
            yield (
                f"{place}: found no true answer in the first rows of "
                f"{', '.join(source.label() for source, _ in rows)}, expected one for each prompt, "
                f"as {scorer.label} reads it. Fix: set columns.reference of the source, or choose "
                "a source of scores that reads none"
            )
        elif isinstance(scorer, CallableReward):
            block = blocks.get(place.partition(".")[0])
            plays = block is not None and block.episodes.has_turns
            asked = {one: [*names, *(["episode"] * plays)] for one, names in carries.items()}
            limit_s = CALL_S if scorer.timeout_s is None else len(RESPONSES) * scorer.timeout_s
            arguments = {
                "place": place, "function": scorer.callable, "call": call if chosen else None,
                "processes": scorer.processes, "sources": asked,
                "together": getattr(block, "responses_per_prompt", 1),
            }  # fmt: skip
            what, files = f"{place}: {scorer.callable}", [source_file(scorer.callable)]
            trial = "try_function", arguments
            yield from _tried(what, trial, files, workspace, LOAD_S + limit_s)
        elif isinstance(scorer, CodeReward):
            try:
                sandbox.check(scorer.timeout_s, scorer.memory_mib)
            except StageError as error:
                yield f"{place}: {error.message}"


def episode_faults(
    place: str, episodes: EpisodesConfig, tasks: Sequence[Example], workspace: Path
) -> Iterator[str]:
    """Tools and an environment that cannot be imported or described, or do not begin."""
    task = None
    if tasks:
        first = tasks[0]
        task = {"messages": first.messages(), "reference": first.reference}
        task |= json.loads(first.extra or "{}")
    arguments = {
        "place": place, "code": episodes.code(), "task": task,
        "arguments": episodes.environment_arguments,
    }  # fmt: skip
    files = [source_file(code) for code in episodes.code().values()]
    what = ", ".join(f"{place}.{name}" for name in episodes.code())
    yield from _tried(what, ("try_episodes", arguments), files, workspace)


def code_faults(blocks: Mapping[str, Any], workspace: Path) -> Iterator[str]:
    """Code of others that cannot be imported, or asks for what nobody offers, in blocks by name.

    One program imports all of it, for most of it imports torch.
    """
    doors = {
        f"{name}.{field}": (place, door.arguments.split(), door.method, [*type(block).model_fields])
        for name, block in blocks.items()
        for field, door, place in at_doors(block)
        if place not in door.builtin.values()
    }
    what = ", ".join(doors)
    try:
        files = [source_file(place) for place, *_ in doors.values()]
    except ConfigError as error:
        yield f"{what}: {error}"
        return
    if doors:
        yield from _tried(f"{what}: code", ("try_doors", {"doors": doors}), files, workspace)


def model_faults(
    blocks: Mapping[str, Any], nodes: Collection[str], workspace: Path
) -> Iterator[str]:
    """What is wrong with local models that must have the policy's tokens, a teacher or the start of
    a critic, and with names of layers for adapters.

    Everything else about the base model is said by the first stage, `base_model`.
    """
    reading = {"distill": "distill.teacher", "ppo": "ppo.critic.base_model"}
    named = "base_model", *(place for node, place in reading.items() if node in nodes)
    bases = own_bases(blocks)
    models = {place: base for place, base in bases.items() if place in named}
    here = {name: m for name, m in models.items() if m.path is None or Path(m.path).is_dir()}
    others = ("reward_model.", "ppo.critic.") if any(".base_model" in one for one in bases) else ()
    lora = {
        place: names
        for place, names in leaves(as_json(blocks) if "base_model" in here else {})
        if place.endswith("lora.target_modules") and place.partition(".")[0] in nodes
        if isinstance(names, list) and not place.startswith(others)  # of models with other layers
    }
    if lora or here.keys() - {"base_model"}:
        folders = [Path(model.path) for model in here.values() if model.path]
        files = [file for folder in folders for file in sorted(folder.iterdir()) if file.is_file()]
        trial = "try_models", {"models": as_json(here), "lora": lora}
        yield from _tried(f"{', '.join(here)}: tokenizers and layers", trial, files, workspace)


def task_faults(tasks: TasksConfig, workspace: Path) -> Iterator[str]:
    """Names of tasks that the harness does not know; it takes seconds to say so."""
    if names := [name for name in tasks.names if name not in tasks.files]:
        trial, harness = ("try_tasks", {"names": names}), source_file("lm_eval:validate")
        yield from _tried("evaluate.tasks.names", trial, [harness], workspace)


def _tried(
    what: str, trial: tuple[str, Mapping[str, Any]], files: Sequence[Path], workspace: Path,
    limit_s: float | None = None,
) -> Iterator[str]:  # fmt: skip
    """Run a trial of the program, given with its arguments, and yield the faults that are certain.

    A fault that another batch may not have is a warning, and so is a trial that does not answer in
    time. A trial without a fault is not repeated until one of the files changes.
    """
    limit_s = LOAD_S if limit_s is None else limit_s
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = json_digest([trial, states, sys.prefix, version("rlhf-pipeline")])
    known = workspace / DRY_RUNS / key[:16]
    if known.is_file():
        return
    logger.info("%s: tried out, for at most %g s", what, limit_s)
    with TemporaryFile() as answers, TemporaryFile() as log:
        how: Any = {"stdin": PIPE, "stdout": answers, "stderr": log, "env": os.environ | OF_RANK}
        process = Popen([sys.executable, "-P", "-m", PROGRAM], start_new_session=True, **how)
        try:
            process.communicate(json.dumps(trial).encode(), limit_s)
        except TimeoutExpired:
            logger.warning("%s: no result after %g s; not checked before the run", what, limit_s)
            return
        finally:
            with suppress(ProcessLookupError):  # it has ended, and left no child
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        answers.seek(0)
        log.seek(0)
        lines = [json.loads(line) for line in answers]
        if is_cut := None not in lines:
            said = log.read().decode(errors="replace").strip().rpartition("\n")[2]
            code = process.returncode
            yield f"{what} ended its process with code {code} ({said}). Fix: correct it"
    faults = [line for line in lines if line is not None]  # a fork of the user's may end, too
    for fault, is_certain in faults:
        if is_certain:
            yield fault
        else:
            logger.warning("%s. The run starts nevertheless: its batches may differ", fault)
    if not faults and not is_cut:
        with suppress(OSError):
            known.parent.mkdir(parents=True, exist_ok=True)
            known.touch()
