"""Does `kedro rlhf plan` predict the memory that ranks need?

    python benchmarks/memory_plan.py              # all configurations, about 20 minutes
    python benchmarks/memory_plan.py sft-zero2    # one of them

Each configuration is a real `kedro run` of a few steps on the CPU. The memory of each rank is read
ten times a second: anonymous memory (RssAnon), and the pages of model files that it has mapped.
Frozen weights stay in such pages, which the system may drop and read again. The maximum is compared
with the plan's for the same parameters. Requirement: within 15% for each configuration. Results:
benchmarks/results/memory_plan/.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

PROJECT = Path(__file__).parents[1]
RESULTS = PROJECT / "benchmarks" / "results" / "memory_plan"
LIMIT = 0.15

WIDE = {
    "base_model.vocab_size": 1024,
    "base_model.architecture.hidden_size": 768,
    "base_model.architecture.intermediate_size": 2048,
    "base_model.architecture.num_hidden_layers": 8,
    "base_model.architecture.num_attention_heads": 12,
    "base_model.architecture.tie_word_embeddings": "false",
}
"""A Llama with 58 million parameters."""
SHORT = {
    "sft.epochs": 2,
    "reward_model.epochs": 1,
    "ppo.steps": 2,
    "evaluate.prompts": 8,
    **{f"{stage}.evaluations": 1 for stage in ("sft", "reward_model", "ppo")},
    **{f"{stage}.batch_size": 64 for stage in ("sft", "reward_model")},
    "sft.micro_batch_tokens": 1024,
    "reward_model.micro_batch_tokens": 2048,
    "ppo.micro_batch_tokens": 1024,
    "ppo.rollout_batch_size": 32,
    "ppo.minibatch_size": 16,
    "ppo.kl.maximum": "null",
}
ONE, TWO = {"launch.processes": 1}, {"launch.processes": 2}


def _zero(model: str, stage: int, **more: Any) -> dict[str, Any]:
    return {
        f"{model}.deepspeed.zero_stage": stage,
        **{f"{model}.deepspeed.{key}": value for key, value in more.items()},
    }


CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft-zero0": ("sft", ONE | _zero("sft", 0)),
    "sft-zero1": ("sft", ONE | _zero("sft", 1)),
    "sft-zero2-bf16": ("sft", TWO | _zero("sft", 2, precision="bf16")),
    "sft-zero3": ("sft", TWO | _zero("sft", 3)),
    "sft-checkpointing": ("sft", ONE | {"sft.gradient_checkpointing": "true"}),
    "sft-lora": ("sft", ONE | {"sft.lora.rank": 16}),
    "sft-zero3-bf16": ("sft", TWO | _zero("sft", 3, precision="bf16")),
    "reward-zero2": ("reward_model", TWO | _zero("reward_model", 2)),
    "reward-lora": ("reward_model", ONE | {"reward_model.lora.rank": 16}),
    "ppo-zero1": ("ppo", ONE),
    "ppo-zero3": ("ppo", TWO | _zero("ppo.actor", 3) | _zero("ppo.critic", 3)),
    "ppo-lora": ("ppo", ONE | {"ppo.actor.lora.rank": 16, "ppo.critic.lora.rank": 16}),
    "ppo-grpo-bf16": (
        "ppo",
        ONE
        | {
            "ppo.advantage": "grpo",
            "ppo.critic": "null",
            "ppo.responses_per_prompt": 4,
            "ppo.actor.deepspeed.precision": "bf16",
        },
    ),
    "dpo-zero1": (
        "dpo",
        ONE
        | {
            "dpo.batch_size": 32,
            "dpo.micro_batch_tokens": 1024,
            "dpo.epochs": 0.35,
            "dpo.evaluations": 1,
        },
    ),
}
"""Stage and parameters."""


def main() -> int:
    """Run the chosen configurations and print a row for each."""
    chosen = sys.argv[1:] or list(CONFIGURATIONS)
    RESULTS.mkdir(parents=True, exist_ok=True)
    rows = [_row(name) for name in chosen]
    table = Table("configuration", "ranks", "measured, MiB", "planned, MiB", "error")
    for name, peaks, planned in rows:
        error = planned / max(peaks) - 1
        table.add_row(name, str(len(peaks)), f"{max(peaks):.0f}", f"{planned:.0f}", f"{error:+.1%}")
    Console().print(table)
    return int(any(abs(planned / max(peaks) - 1) > LIMIT for _, peaks, planned in rows))


def _row(name: str) -> tuple[str, list[float], float]:
    """The name, the measured peak of each rank, and the planned one, in MiB."""
    stage, changes = CONFIGURATIONS[name]
    root = PROJECT / "data" / "memory_plan"
    parameters = {"root": str(root), "force": stage} | WIDE | SHORT | changes
    pipeline = "dpo" if stage == "dpo" else "full"
    options = [f"--pipeline={pipeline}", "--env=tiny"]
    options += ["--params=" + ",".join(f"{k}={v}" for k, v in parameters.items())]
    peaks = measured(stage, options)
    planned = plan(stage, options)
    (RESULTS / f"{name}.json").write_text(json.dumps({"measured": peaks, "planned": planned}))
    return name, peaks, planned


def measured(stage: str, options: list[str]) -> list[float]:
    """Run the pipeline up to a stage; the peak of each of its ranks, in MiB."""
    command = [f"{sys.prefix}/bin/kedro", "run", f"--to-nodes={stage}", *options]
    peaks: dict[int, float] = {}
    with (RESULTS / "run.log").open("w") as log:
        process = subprocess.Popen(command, cwd=PROJECT, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                _read(child, f"rlhf_pipeline.training.{stage}", peaks)
            time.sleep(0.1)
    if process.returncode:
        sys.exit((RESULTS / "run.log").read_text())
    return [peak for peak in peaks.values() if peak > 400]  # without the programs that start them


def _read(process: psutil.Process, program: str, peaks: dict[int, float]) -> None:
    """Update the peak of a process if it is a rank of the program."""
    try:
        if process.pid not in peaks and program not in process.cmdline():
            return
        maps = Path(f"/proc/{process.pid}/smaps").read_text()
    except (psutil.Error, OSError):
        return
    peaks[process.pid] = max(peaks.get(process.pid, 0), _resident(maps) / 1024)


def _resident(maps: str) -> int:
    """KiB of a process in anonymous memory and in mapped model files, from its /proc/.../smaps."""
    found, is_model_file = 0, False
    for line in maps.splitlines():
        key, _, value = line.partition(":")
        if " " in key:  # the first line of a mapping: addresses, and the file
            is_model_file = line.endswith(".safetensors")
        elif key == ("Rss" if is_model_file else "Anonymous"):
            found += int(value.split()[0])
    return found


def plan(stage: str, options: list[str]) -> float:
    """What `kedro rlhf plan` says about a rank of the stage, in MiB."""
    command = [f"{sys.prefix}/bin/kedro", "rlhf", "plan", "--json", *options]
    output = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True).stdout
    (found,) = (each for each in json.loads(output)["stages"] if each["stage"] == stage)
    return float(found["peak"]) / 2**20


if __name__ == "__main__":
    sys.exit(main())
