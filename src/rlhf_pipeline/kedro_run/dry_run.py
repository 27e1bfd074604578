"""What can be known in seconds, before the first stage: the first rows are read, each function of a
reward or judge is called once, other code of the user is imported, and a teacher's tokenizer and
names of layers are looked at."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.config.doors import at_doors, source_file
from rlhf_pipeline.config.evaluate import TasksConfig
from rlhf_pipeline.config.rewards import CallableReward, CodeReward, reads_references
from rlhf_pipeline.config.sample import SampledConfig
from rlhf_pipeline.config.split import BlendedSourceConfig, SourceConfig, SplitConfig
from rlhf_pipeline.config.stages import prompt_policies
from rlhf_pipeline.data.records import Example
from rlhf_pipeline.data.sources.registry import FirstRows, carried, first_rows
from rlhf_pipeline.errors import ConfigError, DataError, StageError
from rlhf_pipeline.kedro_run.faults import refuse
from rlhf_pipeline.pipelines.table import blocks_of
from rlhf_pipeline.runtime import sandbox
from rlhf_pipeline.runtime.job import DRY_RUNS, as_json

logger = logging.getLogger(__name__)

PROGRAM = "rlhf_pipeline.scoring.dry_run"
LOAD_S, CALL_S = 120.0, 60.0
"""Longest time for imports, and for a function without `timeout_s`."""
RESPONSES = ("The answer is 5.", "An example of an answer.", "")
"""What functions score: a policy may also end at once."""
CAREFUL, FEWEST = "evaluate.judge_model", 20
"""The place of a second reward model, and the fewest comparisons that it must have."""
DOUBT = "%s: %s. The run starts nevertheless: its batches may differ from this trial"
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
    sources = split.sources if "split" in nodes else ()
    texts = split.pretraining.readings() if sources and split.pretraining else []
    rows = [
        (source, _first_rows(f"split.sources.{index}", source.reading(), split))
        for index, source in enumerate(sources)
    ]
    for index, text in enumerate(texts):
        _first_rows(f"split.pretraining.sources.{index}", text, split)
    for_ppo = [(source, each) for source, each in rows if source.may_serve("ppo")]
    rewards = {
        f"{policy.sampler}.rewards.{index}": reward
        for policy in policies
        if policy.stage in nodes
        for index, reward in enumerate(policy.rewards)
    }
    judges = {
        f"evaluate.judges.{index}": judge
        for index, judge in enumerate(evaluate.judges if is_judged else ())
    }
    faults = [
        *reference_faults(rewards, for_ppo),
        *reference_faults(judges, rows),
    ]
    judge = evaluate.judge_model
    if is_judged and judge is not None and judge.path is not None:
        careful = _first_rows(CAREFUL, judge.source.reading(), split)
        faults += careful_faults(careful, ranks)
    refuse(faults)
    every = dict(enumerate(split.sources))
    judge_too = blocks["reward_model"] is None and not evaluate.judges
    rated = {index: one for index, one in every.items() if judge_too or one.may_serve("ppo")}
    samples = {one.sampler: one.sample for one in policies if isinstance(one, SampledConfig)}
    refuse(
        [
            *code_faults({**blocks, **samples}, workspace),
            *function_faults(rewards, for_ppo, rated, blocks, workspace),
            *function_faults(judges, rows, every, blocks, workspace),
            *(task_faults(evaluate.tasks, workspace) if is_judged and evaluate.tasks else ()),
            *model_faults(blocks, nodes, workspace),
        ]
    )


def _first_rows(place: str, source: SourceConfig, split: SplitConfig) -> FirstRows:
    try:
        return first_rows(source, split.max_bad_fraction)
    except DataError as error:
        raise DataError(f"{place}: {error.message}") from None


def _known(rows: Rows) -> list[Example]:
    return [row for _, each in rows for row in each.values()]


def _labels(rows: Rows) -> str:
    return ", ".join(source.label() for source, _ in rows)


def reference_faults(sources: Mapping[str, Any], rows: Rows) -> Iterator[str]:
    """Rewards or judges, by place, that read true answers, if none of the first rows has one."""
    is_known = rows and all(each.is_uniform for _, each in rows)
    for place, source in sources.items() if is_known else ():
        if reads_references(source) and not any(row.reference for row in _known(rows)):
            yield (
                f"{place}: found no true answer in the first rows of {_labels(rows)}, expected one "
                f"for each prompt, as {source.label} reads it. Fix: set columns.reference of the "
                "source, or choose a source of scores that reads none"
            )


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
    places = [place for place, *_ in doors.values()]
    try:
        asked, files = {"doors": doors}, [source_file(place) for place in places]
        yield from _answer(", ".join(places), asked, files, LOAD_S, workspace) if doors else ()
    except ConfigError as error:
        yield f"{', '.join(doors)}: {error}"
    except StageError as error:
        yield f"{', '.join(doors)}: {error}. Fix: correct it"


def function_faults(
    functions: Mapping[str, Any], rows: Rows, sources: Mapping[int, SourceConfig],
    blocks: Mapping[str, Any], workspace: Path,
) -> Iterator[str]:  # fmt: skip
    """What is wrong with the functions among rewards or judges, by place, each called once, and
    with the sandbox of programs. An exception that another batch may not raise is a warning.

    No function is called on made-up data: without rows, or true answers, it is only imported.
    `sources` have the columns that functions ask for, and `blocks` the responses to a prompt.
    """
    known = _known(rows)
    with_answers = [row for row in known if row.reference is not None]
    chosen = [*islice(cycle(with_answers or known), len(RESPONSES))]
    further = [json.loads(row.extra or "{}") for row in chosen]
    columns = {name: [row.get(name) for row in further] for row in further for name in row}
    columns |= {"references": [row.reference for row in with_answers and chosen]}
    call = [row.messages() for row in chosen], RESPONSES, columns
    further_of = {f"split.sources.{index}": carried(one) for index, one in sources.items()}
    for place, source in functions.items():
        if isinstance(source, CallableReward):
            name = source.callable
            together = getattr(blocks.get(place.partition(".")[0]), "responses_per_prompt", 1)
            asked: dict[str, Any] = {"function": name, "call": call if chosen else None}
            asked |= {"sources": further_of, "processes": source.processes, "together": together}
            call_s = len(RESPONSES) * source.timeout_s if source.timeout_s else CALL_S
            try:
                found = _answer(name, asked, [source_file(name)], LOAD_S + call_s, workspace)
            except StageError as error:
                fix = "Fix: correct it, or set processes and timeout_s for it"
                found = [(f"{error}. {fix}", True)]
            for fault, is_certain in found:
                if is_certain:
                    yield f"{place}: {fault}"
                else:
                    logger.warning(DOUBT, place, fault)
        elif isinstance(source, CodeReward):
            try:
                sandbox.check(source.timeout_s, source.memory_mib)
            except StageError as error:
                yield f"{place}: {error.message}"


def model_faults(blocks: Mapping[str, Any], nodes: Collection[str], workspace: Path) -> list[str]:
    """What is wrong with a teacher in a local folder, and with names of layers for adapters.

    Everything else about the base model is said by the first stage, `base_model`.
    """
    models = {"base_model": blocks["base_model"]}
    if "distill" in nodes:
        models["distill.teacher"] = blocks["distill"].teacher
    here = {name: m for name, m in models.items() if m.path is None or Path(m.path).is_dir()}
    lora = {
        place: names
        for place, names in leaves(as_json(blocks) if "base_model" in here else {})
        if place.endswith("lora.target_modules") and place.partition(".")[0] in nodes
        if isinstance(names, list)
    }
    if not lora and "distill.teacher" not in here:
        return []
    asked = {"models": as_json(here), "lora": lora}
    folders = [Path(model.path) for model in here.values() if model.path]
    files = [file for folder in folders for file in sorted(folder.iterdir()) if file.is_file()]
    try:
        return _answer("the check of models", asked, files, 2 * LOAD_S, workspace)
    except StageError as error:
        logger.warning("%s: not checked before the run: %s", ", ".join(here), error)
        return []


def task_faults(tasks: TasksConfig, workspace: Path) -> Iterator[str]:
    """Names of tasks that the harness does not know; it takes seconds to say so."""
    if names := [name for name in tasks.names if name not in tasks.files]:
        asked, harness = {"names": names}, source_file("lm_eval:validate")
        yield from _answer("evaluate.tasks.names", asked, [harness], LOAD_S, workspace)


def _answer(
    what: str, asked: Mapping[str, Any], files: Sequence[Path], limit_s: float, workspace: Path
) -> list[Any]:
    """What the program answers; "no fault" is remembered until a file changes. It warns if there is
    no answer in time.

    Raises StageError if the process ends without an answer.
    """
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = json.dumps([asked, states, sys.prefix, version("rlhf-pipeline")], sort_keys=True)
    known = workspace / DRY_RUNS / sha256(key.encode()).hexdigest()[:16]
    with suppress(OSError):
        if known.is_file():
            return []
    logger.info("%s: tried out, for at most %g s", what, limit_s)
    with TemporaryDirectory(prefix="dry-run-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "question.json").write_text(json.dumps(asked))
        command = [sys.executable, "-P", "-m", PROGRAM, name]
        options: Any = {"stdin": subprocess.DEVNULL, "env": os.environ | OF_RANK}
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, **options
            )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            logger.warning("%s: no result after %g s; not checked before the run", what, limit_s)
            return []
        finally:
            with suppress(ProcessLookupError):  # it has ended, and left no child
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not (answer := folder / "faults.json").is_file():
            last = (folder / "log").read_text(errors="replace").strip().rpartition("\n")[2]
            said = f" ({last})" if last else ""
            raise StageError(f"{what} ended its process with code {process.returncode}{said}")
        found: list[Any] = json.loads(answer.read_text())
    if not found:
        with suppress(OSError):
            known.parent.mkdir(parents=True, exist_ok=True)
            known.touch()
    return found
