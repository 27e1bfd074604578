"""Does the gate decide rightly where nobody knows the truth?

Two worlds as plain files, as a user has them: comparisons of annotators who read, and of hasty ones
who prefer long answers. No run sees the gold score. PPO is judged by its own reward model (every
default), by a second one from comparisons held back, and by one from 300 careful comparisons. Each
decision of the gate stands beside the truth, which only this script knows.

    python benchmarks/without_gold.py                    # ten seeds of both worlds
    python benchmarks/without_gold.py --seeds 1 2 --worlds hasty

Finished stages are reused, so an interrupted benchmark resumes. Each world and seed runs with one
process on its own core. Results: benchmarks/results/without_gold/.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from experiments import PROJECT, RESULTS, Tree, commit, side_by_side
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.data.sources import synthetic
from rlhf_pipeline.verdict.statistics import win_rate

FOLDER = RESULTS / "without_gold"
WORLDS = ("good", "hasty")
CAREFUL = 300
"""Comparisons that a user makes with care: few enough for two evenings."""
JUDGES: dict[str, Tree] = {
    "own reward model": {},
    "second, held back": {"evaluate.judge_model": {"held_back": 0.5}},
    "second, careful": {"evaluate.judge_model": {"path": "careful.jsonl"}},
}
"""What differs from the default's parameters."""


def main() -> None:
    """Run worlds and seeds, one on each core at a time; print the decisions beside the truth."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 11)))
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    tasks = [(world, seed) for seed in arguments.seeds for world in arguments.worlds]
    for world, seed in side_by_side(measure, tasks):
        print(f"{world} {seed}: done", flush=True)
    found = {task: json.loads((FOLDER / f"{task[0]}-{task[1]}.json").read_text()) for task in tasks}
    console = Console(width=190)
    console.print(f"at commit {commit()}")
    console.print(decisions(found))
    console.print(summary(found))


def measure(world: str, seed: int) -> tuple[str, int]:
    """Train and judge in one world with one seed, and write each decision and the truth."""
    from rlhf_pipeline import run

    root = FOLDER / f"{world}-{seed}"
    write_files(world, seed, root)
    log = os.open(root / "run.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{root}/mlflow.db"
    found: Tree = {}
    for number, (judge, changes) in enumerate(JUDGES.items()):
        own: Tree = {
            "seed": seed,
            "root": str(root),
            "launch.processes": 1,
            "split.sources": sources(world, root),
            "split.test_fraction": 0,
            "evaluate.best_of_n": 0,
            "register.model": f"policy-{number}",  # each is the first try on its test set
        }
        if "path" in (given := changes.get("evaluate.judge_model", {})):
            changes = {"evaluate.judge_model": given | {"path": str(root / given["path"])}}
        found[judge] = decision(run("full", params=own | changes, project=PROJECT), root)
    (FOLDER / f"{world}-{seed}.json").write_text(json.dumps(found, indent=2))
    return world, seed


def write_files(world: str, seed: int, root: Path) -> None:
    """The files of a world: comparisons, test prompts, and a few careful comparisons."""
    usual = SourceConfig(name="synthetic", samples=30_000)
    hasty = SourceConfig(name="synthetic", samples=12_000, subset="hasty")
    test = SourceConfig(name="synthetic", samples=600, split="test")
    files = {"test": generated(test, seed), "careful": careful(seed)}
    if world == "good":
        files["comparisons"] = generated(usual, seed)
    else:
        files |= {"demonstrations": generated(usual, seed), "hasty": generated(hasty, seed)}
    root.mkdir(exist_ok=True)
    for name, rows in files.items():
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (root / f"{name}.jsonl").write_text(text)


def generated(source: SourceConfig, seed: int) -> Iterator[dict[str, Any]]:
    """The rows of the world."""
    for _, row in synthetic.generate(source, seed):
        yield {"prompt": row.prompt[-1].content, "chosen": row.chosen, "rejected": row.rejected}


def careful(seed: int) -> Iterator[dict[str, Any]]:
    """Comparisons by the most careful annotator of the world, of requests of the training."""
    rng, annotator = Random(f"{seed} careful"), synthetic.ANNOTATORS[None][0]
    for _ in range(CAREFUL):
        drawn = synthetic._draw(rng, test=False)
        first, second = synthetic._pair(drawn, rng)
        if rng.random() >= annotator.prefers(drawn, first, second):
            first, second = second, first
        yield {"prompt": drawn.text(), "chosen": first, "rejected": second}


def sources(world: str, root: Path) -> list[Tree]:
    """The sources of a world: files. Hasty annotators compare what others have written."""

    def file(name: str, *phases: str) -> Tree:
        found: Tree = {"name": "files", "path": str(root / f"{name}.jsonl")}
        return found | ({"phases": list(phases)} if phases else {})

    test = file("test", "test")
    if world == "good":
        return [file("comparisons"), test]
    return [file("demonstrations", "sft", "ppo"), file("hasty", "reward_model"), test]


def decision(result: Any, root: Path) -> Tree:
    """What the gate decided about PPO and why, and the truth about independent answers."""
    (file,) = (root / "08_reporting/registration.json").glob(f"{result.version}/*.json")
    decided = json.loads(file.read_text())
    true = {
        policy: [
            synthetic.world_score(answer.messages[-1]["content"], answer.response)
            for answer in answers
        ]
        for policy, answers in result.answers.items()
    }
    rate = win_rate(true["ppo"], true["sft_again"])
    failed = [check["what"] for check in decided["verdict"]["checks"] if not check["passed"]]
    judged = result.evaluation.win_rate
    return {
        "promoted": decided["promoted"],
        "failed": failed,
        "judged": [judged[key] for key in ("rate", "lower", "upper")],
        "checks": decided["verdict"]["checks"],
        "true": [rate.rate, rate.lower, rate.upper],
    }


def decisions(found: dict[tuple[str, int], Tree]) -> Table:
    """A row for each world and seed."""
    table = Table(title="PPO against SFT: the truth, and what the gate decided without it")
    table.add_column("world, seed")
    for judge in JUDGES:
        table.add_column(f"true win rate: {judge}", justify="right")
        table.add_column("promoted")
    for (world, seed), by in found.items():
        cells = []
        for judge in JUDGES:
            rate, lower, upper = by[judge]["true"]
            cells += [f"{rate:.3f} [{lower:.3f}, {upper:.3f}]", words(by[judge])]
        table.add_row(f"{world} {seed}", *cells)
    return table


def words(one: Tree) -> str:
    """The decision with its reasons."""
    return "yes" if one["promoted"] else f"no: {'; '.join(one['failed'])}"


def summary(found: dict[tuple[str, int], Tree]) -> Table:
    """How many policies each judge promoted in each world, and how many of them are better."""
    table = Table(title="Promotions")
    for column in ("world", "judge", "truly better", "promoted", "for each refusal alone"):
        table.add_column(column)
    for world in WORLDS:
        rows = [by for (own, _), by in found.items() if own == world]
        for judge in JUDGES if rows else ():
            better = sum(row[judge]["true"][1] > 0.5 for row in rows)
            promoted = sum(row[judge]["promoted"] for row in rows)
            alone = sorted(only(row[judge]["failed"] for row in rows))
            table.add_row(
                world, judge, f"{better} of {len(rows)}", f"{promoted} of {len(rows)}",
                ", ".join(alone),
            )  # fmt: skip
    return table


def only(failures: Iterable[list[str]]) -> set[str]:
    """The conditions that were the only reason of a refusal."""
    return {failed[0] for failed in failures if len(failed) == 1}


if __name__ == "__main__":
    main()
