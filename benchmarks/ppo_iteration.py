"""One iteration of PPO or GRPO, this project beside TRL: seconds and main memory.

    python benchmarks/ppo_iteration.py                         # sizes small and base, fp32 and bf16
    python benchmarks/ppo_iteration.py --methods=grpo --sizes=base --precisions=fp32 --rounds=5

Both train OPT models of the same shape on the same HH-RLHF prompts (the file in HH_RLHF_PATH, or
the hub), with 64 new tokens, one epoch and one optimizer step. An iteration of PPO generates,
scores by reference, critic and reward model, and updates actor and critic. One of GRPO generates 4
responses to each prompt, scores by the reference and a regular expression, and updates the actor.
The two take turns, one iteration each with the same prompts, so a slow minute of the machine counts
for both. TRL runs with one process, this project with `--ranks` ranks; both use all cores.

PPO is that of the last TRL that has it, GRPO that of the newest one. They are installed into
benchmarks/results/ppo_iteration/ without their dependencies, which this project's environment
contains already. Results: a table, and in the same folder a file *.json for each row.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

PROJECT = Path(__file__).parents[1]
RESULTS = PROJECT / "benchmarks" / "results" / "ppo_iteration"
OURS = Path(__file__).with_name("ppo_iteration_ours.py")
TRLS = {
    "ppo": Path(__file__).with_name("ppo_iteration_trl.py"),
    "grpo": Path(__file__).with_name("grpo_iteration_trl.py"),
}
TRL = {"ppo": "trl==1.9.2", "grpo": "trl==1.16.0"}
GROUP = 4  # responses to each prompt of GRPO
WARM_UP = 2
"""Iterations before the measured ones; memory is read during these."""


@dataclass(frozen=True)
class Work:
    """One iteration: the shape of the OPT models, and what they read and write."""

    layers: int
    hidden: int
    batch: int
    """Responses."""
    vocabulary: int = 8192
    prompt_tokens: int = 256
    """Longer prompts are not used."""
    response_tokens: int = 64


SIZES = {"small": Work(4, 256, batch=16), "base": Work(12, 768, batch=8)}
"""5.5 million parameters, and the shape of OPT-125M with a smaller vocabulary."""


@dataclass
class Contestant:
    """Processes that take one iteration whenever the first one is asked to."""

    processes: list[subprocess.Popen[str]]
    seconds: list[float] = field(default_factory=list)
    memory: int = 0
    """Most bytes of main memory during the warm-up; pages that processes share count once."""

    def iterate(self) -> None:
        """Take one iteration and wait for it."""
        self.seconds.append(self.ask()["seconds"])

    def warm_up(self) -> None:
        """Take an iteration that is not measured, and read the memory meanwhile."""
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(self.ask)
            while not done.done():
                used = sum(psutil.Process(p.pid).memory_full_info().pss for p in self.processes)
                self.memory = max(self.memory, used)
                time.sleep(0.2)
            done.result()

    def ask(self) -> dict[str, float]:
        """Ask for an iteration and wait for its report."""
        first = self.processes[0]
        assert first.stdin is not None and first.stdout is not None
        first.stdin.write("go\n")
        first.stdin.flush()
        for line in first.stdout:
            if line.startswith('{"seconds"'):
                return json.loads(line)
        raise SystemExit(
            f"found the end of {first.args[1]}, expected a result. See {RESULTS}/*.log"
        )


def main() -> None:
    """Prepare, measure, show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--methods", default="ppo,grpo")
    parser.add_argument("--sizes", default="small,base")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    methods = options.methods.split(",")
    for method in methods:
        install_trl(method)
    rows = []
    for size in options.sizes.split(","):
        inputs = prepare(SIZES[size], RESULTS / size)
        for method, precision in product(methods, options.precisions.split(",")):
            rows.append(measure(method, size, precision, inputs, options.rounds, options.ranks))
            name = f"{method}-{size}-{precision}-{options.ranks}.json"
            (RESULTS / name).write_text(json.dumps(rows[-1], indent=2))
    show(rows)


def install_trl(method: str) -> Path:
    """A folder with the TRL of a method."""
    folder = RESULTS / TRL[method]
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, f"--target={folder}", TRL[method]], check=True)
    return folder


def prepare(work: Work, root: Path) -> dict[str, Path]:
    """The untrained policy, a reward model with the same weights, and the prompts."""
    model = {
        "model_type": "opt", "max_position_embeddings": 512, "initializer_range": None,
        "hidden_size": work.hidden, "word_embed_proj_dim": work.hidden,
        "ffn_dim": 4 * work.hidden, "intermediate_size": None,
        "num_hidden_layers": work.layers, "num_attention_heads": work.hidden // 64,
    }  # fmt: skip
    parameters = {
        "root": str(root), "base_model.vocab_size": work.vocabulary,
        **{f"base_model.architecture.{name}": value for name, value in model.items()},
        "split.max_prompt_tokens": work.prompt_tokens,
        "split.max_response_tokens": work.response_tokens,
        "split.over_long_responses": "truncate",
    }  # fmt: skip
    given = ",".join(f"{name}={'null' if v is None else v}" for name, v in parameters.items())
    kedro = [str(Path(sys.executable).with_name("kedro")), "run", "--env=hh-rlhf"]
    environment = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{RESULTS}/mlflow.db"}
    command = [*kedro, "--pipeline=data_preparation", f"--params={given}"]
    subprocess.run(command, cwd=PROJECT, env=environment, check=True)
    policy = max(root.glob("02_base_model/base_model/2*/base_model"))
    split = max(root.glob("03_split/split/2*/split"))
    reward_model = root / "reward_model"
    if not reward_model.is_dir():
        make_reward_model(policy, reward_model)
    return {"sft_model": policy, "reward_model": reward_model, "prompts": split / "ppo"}


def make_reward_model(policy: Path, folder: Path) -> None:
    """Save the policy with a random scalar head."""
    import torch

    from rlhf_pipeline.distributed.model_files import save_model
    from rlhf_pipeline.models.loading import load_tokenizer
    from rlhf_pipeline.models.scalar_head import load_scores, store_score_mean

    torch.manual_seed(1)
    model = load_scores(policy, "fp32", new_head=True)
    save_model(model, load_tokenizer(policy), folder)
    store_score_mean(folder, 0.0)


def measure(
    method: str, size: str, precision: str, inputs: dict[str, Path], rounds: int, ranks: int
) -> dict[str, Any]:
    """Let both take turns; return medians."""
    folder = RESULTS / f"{method}-{size}-{precision}"
    job = job_of(SIZES[size], precision, inputs, folder) | {"method": method, "group": GROUP}
    with ExitStack() as stack:
        contestants = {
            "ours": stack.enter_context(started(OURS, job, ranks)),
            "trl": stack.enter_context(started(TRLS[method], job, 1, install_trl(method))),
        }
        for _ in range(WARM_UP):
            for contestant in contestants.values():
                contestant.warm_up()
        for _ in range(rounds):
            for contestant in contestants.values():
                contestant.iterate()
        steps = (Path(job["folder"]) / "metrics.jsonl").read_text().splitlines()[-rounds:]
    rollouts = [json.loads(step)["metrics"]["time/rollout_s"] for step in steps]
    ratios = [
        theirs / ours
        for ours, theirs in zip(*(c.seconds for c in contestants.values()), strict=True)
    ]
    return {
        "method": method, "size": size, "precision": precision, "ranks": ranks, "ratios": ratios,
        "rollout": statistics.median(rollouts),
        **{
            name: {
                "seconds": c.seconds, "memory": c.memory,
                "median": statistics.median(c.seconds),
            }
            for name, c in contestants.items()
        },
    }  # fmt: skip


def job_of(work: Work, precision: str, inputs: dict[str, Path], folder: Path) -> dict[str, Any]:
    """What the programs get."""
    return {
        "inputs": {name: str(path) for name, path in inputs.items()}, "precision": precision,
        "batch": work.batch, "response_tokens": work.response_tokens, "folder": str(folder),
    }  # fmt: skip


@contextmanager
def started(
    program: Path, job: dict[str, Any], ranks: int, path: Path | None = None
) -> Iterator[Contestant]:
    """A contestant's processes; they end with the block. The first one reads `go`."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    processes = []
    for rank in reversed(range(ranks)):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": str(threads),
            "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        if path is not None:
            environment["PYTHONPATH"] = str(path)
        with (RESULTS / f"{program.stem}-{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(program), json.dumps(job)],
                    env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    text=True,
                )
            )  # fmt: skip
    try:
        yield Contestant(processes[::-1])
    finally:
        for process in processes:
            process.kill()
            process.wait()


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title="One iteration, medians")
    columns = (
        "method",
        "size",
        "precision",
        "ranks",
        "ours, s",
        "of it rollout",
        "TRL, s",
        "ratio",
        "range",
    )
    for column in (*columns, "ours, GB", "TRL, GB"):
        table.add_column(column, justify="right")
    for row in rows:
        ours, trl, ratios = row["ours"], row["trl"], row["ratios"]
        table.add_row(
            row["method"], row["size"], row["precision"], str(row["ranks"]),
            f"{ours['median']:.2f}",
            f"{row['rollout']:.2f}", f"{trl['median']:.2f}",
            f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}",
            f"{ours['memory'] / 1e9:.2f}", f"{trl['memory'] / 1e9:.2f}",
        )  # fmt: skip
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
