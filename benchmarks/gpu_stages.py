"""The rows of `gpu.py` that start what `kedro run` starts, and the tests marked `gpu`.

All stages with the default model and with 1.2 billion weights; training with adapters,
with 4-bit weights and with offload; and training that is killed and resumes. The large model is
random and trains for a few steps on random words, 512 tokens of prompt and 512 of response: its
figures show that it fits and runs, not how well it learns.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from statistics import median

from experiments import PROJECT, RESULTS, Tree, parameters
from gpu_rows import FOLDER, Memory
from omegaconf import OmegaConf

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.kedro_run.checks import check
from rlhf_pipeline.pipelines.evaluate import evaluate
from rlhf_pipeline.pipelines.ppo import PPO, ppo
from rlhf_pipeline.pipelines.preparation import base_model, split
from rlhf_pipeline.pipelines.supervised import DPO, dpo, reward_model, sft
from rlhf_pipeline.pipelines.table import parameter_blocks
from rlhf_pipeline.runtime.metrics_file import read_json_lines
from rlhf_pipeline.stages.job import RunContext, StageListener, StageRun, Status
from rlhf_pipeline.stages.launch.resources import visible_gpus
from rlhf_pipeline.stages.run import StageRunner

OPTIONAL = re.compile(r"not installed|needs vllm")
"""Reasons for which a test may be skipped."""
REHEARSES = "bf16"
"""The row that a rehearsal runs; it checks the parameters of the others."""


def trained(block: Tree) -> Tree:
    """The same settings for every model that trains."""
    return {
        **dict.fromkeys(("sft", "reward_model", "dpo"), block),
        "ppo": {"actor": block, "critic": block},
    }


def engines(precision: str, zero_stage: int = 2, **deepspeed: bool) -> Tree:
    """A precision for all models, with the same ZeRO stage for every model that trains.

    PPO's reference is left out: with adapters, the actor is its own reference.
    """
    settings = {"precision": precision, "zero_stage": zero_stage, **deepspeed}
    return merged(
        trained({"deepspeed": settings, "optimizer": {"learning_rate": 1e-5}}),
        {"ppo": {"reward_model": frozen(precision)}, "evaluate": {"precision": precision}},
    )


def frozen(precision: str) -> Tree:
    """A frozen model."""
    return {"deepspeed": {"precision": precision}}


def reference(precision: str) -> Tree:
    """PPO's reference, a model of its own."""
    return {"ppo": {"reference": frozen(precision)}}


def merged(*trees: Tree) -> Tree:
    """Nested parameters; later ones win."""
    return dict(OmegaConf.to_container(OmegaConf.merge(*trees)))  # type: ignore[arg-type]


BILLION = {
    "base_model": {
        "architecture": {
            "hidden_size": 2048,
            "intermediate_size": 5504,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "initializer_range": 0.02,
        }
    }
}
"""A Llama of 1.2 billion weights."""
TOKENS = 512
"""Tokens of every prompt and of every response: half of a context."""
WORDS = 4096
"""Different words of the texts; most of them become a token."""
SAMPLING = {"max_response_tokens": TOKENS}
SUPERVISED = {"batch_size": 64, "micro_batch_tokens": 16384}
LONG = {
    "base_model": {"architecture": {"max_position_embeddings": 2 * TOKENS}},
    "split": {
        "max_prompt_tokens": TOKENS,
        "max_response_tokens": TOKENS,
        "over_long_prompts": "truncate",
        "over_long_responses": "truncate",
    },
    "sft": SUPERVISED,
    "reward_model": SUPERVISED,
    "dpo": SUPERVISED,
    "ppo": {
        "rollout_batch_size": 64,
        "minibatch_size": 64,
        "micro_batch_tokens": 16384,
        "sampling": SAMPLING,
    },
    "evaluate": {"micro_batch_tokens": 16384, "sampling": SAMPLING},
}
"""Contexts and micro batches of the size that GPUs are used with."""
ADAPTERS = trained({"lora": {"rank": 16}, "optimizer": {"learning_rate": 1e-4}})
QUANTIZED = trained({"lora": {"quantize": "nf4"}})


@dataclass(frozen=True)
class Row:
    """Parameters with which the stages run."""

    title: str
    changes: Tree = field(default_factory=dict)
    """Changes to the environment."""
    environment: str = "tiny"
    """The data and the steps; the model is in `changes`."""
    whole: bool = False
    """Whether to run evaluation and DPO as well."""
    gpu_only: Tree = field(default_factory=dict)
    """Changes that no CPU can do."""
    package: str = ""
    """A package that the row needs on GPUs."""


ROWS = {
    "default": Row("default model, fp32", environment="base", whole=True),
    "bf16": Row(
        "1.2B, bf16, ZeRO 2", merged(BILLION, engines("bf16"), reference("bf16")), whole=True
    ),
    "lora": Row("1.2B, bf16, LoRA", merged(BILLION, engines("bf16"), ADAPTERS)),
    "4-bit": Row(
        "1.2B, 4-bit base, LoRA",
        merged(BILLION, engines("bf16"), ADAPTERS),
        gpu_only=QUANTIZED,
        package="bitsandbytes",
    ),
    "offload": Row(
        "1.2B, bf16, ZeRO 3, offload",
        merged(
            BILLION,
            engines("bf16", 3, offload_optimizer=True, offload_parameters=True),
            reference("bf16"),
        ),
    ),
}
REHEARSED = {
    "base_model": {"architecture": {"hidden_size": 48, "intermediate_size": 96,
                                    "num_hidden_layers": 2, "num_attention_heads": 4}},
    "split": {"sources": [{"name": "synthetic", "samples": 200}]},
    "ppo": {"steps": 2},
}  # fmt: skip
"""The model and the data of a rehearsal."""


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    row: str
    stage: str
    verdict: str
    """pass, FAIL, or skip if a package is missing."""
    seconds: float
    rate: str = ""
    """Median over the steps after the first."""
    peak_mib: int | None = None
    """The most memory used on one of the GPUs, by all processes."""
    reason: str = ""


class Meter(StageListener):
    """Measures every stage that is launched."""

    def __init__(self, row: str) -> None:
        self.row = row
        self.results: list[Result] = []

    def stage_started(self, run: StageRun) -> None:
        """Start the clock and the readings of the memory."""
        self._start, self._memory = time.monotonic(), Memory()

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        """Add the result."""
        peak = self._memory.stop()
        if not run.cached:
            seconds = time.monotonic() - self._start
            verdict = "pass" if status == "FINISHED" else "FAIL"
            speed = rate(run)
            self.results.append(Result(self.row, run.title, verdict, seconds, speed, peak))


def rate(run: StageRun) -> str:
    """The speed of a training stage, from its metrics."""
    steps = [r["metrics"] for r in read_json_lines(run.metrics_file)][1:]
    config = run.config.get(run.stage, {})
    if not steps or "time/step_s" not in steps[0]:
        return ""
    if run.stage == "sft":
        return f"{median(s['sft/tokens'] / s['time/step_s'] for s in steps):,.0f} tokens/s"
    if run.stage == "ppo":
        answers = config["rollout_batches"] * config["rollout_batch_size"]
        sampled = (s["rollout/response_tokens"] * answers / s["time/generation_s"] for s in steps)
        return f"{median(sampled):,.0f} sampled tokens/s"
    return f"{median(config['batch_size'] / s['time/step_s'] for s in steps):,.1f} pairs/s"


def run_stages(name: str, rehearsal: bool) -> list[Result]:
    """Run the stages of a row; the result of the last one has the reason if it failed."""
    row, meter, start = ROWS[name], Meter(name), time.monotonic()
    if row.package and not rehearsal and find_spec(row.package) is None:
        return [Result(name, "", "skip", 0.0, reason=f"needs the package {row.package}")]
    try:
        values = row_parameters(row, rehearsal)
        check(values, gpus=len(visible_gpus()))
        if rehearsal and name != REHEARSES:
            reason = f"its parameters are valid; the rehearsal of {REHEARSES} trains"
            return [Result(name, "", "pass", 0.0, reason=reason)]
        blocks = {
            name: block.model_validate(values.get(name, {}))
            for name, block in parameter_blocks().items()
            if values.get(name, {}) is not None
        }
        context = RunContext(FOLDER / "workspace", LaunchConfig(), listener=meter)
        common = values["seed"], StageRunner(context)
        base = base_model(blocks["base_model"], blocks["split"], *common)
        rows = split(base, blocks["split"], None, *common)
        policy = sft(rows, base, blocks["sft"], *common)
        own = blocks["split"], blocks["reward_model"]
        scores = reward_model(base, rows, policy, *own, *common)
        judge, last = (
            (scores, blocks["reward_model"]),
            (blocks["split"], blocks["evaluate"], *common),
        )
        by_ppo = ppo(rows, policy, *judge, blocks["ppo"], *common)
        if row.whole:
            evaluate(PPO)(rows, policy, by_ppo, *judge, blocks["ppo"], *last)
            by_dpo = dpo(rows, policy, blocks["dpo"], *common)
            evaluate(DPO)(rows, policy, by_dpo, *judge, blocks["dpo"], *last)
    except Exception as error:  # the other rows can still run
        failed = [result for result in meter.results if result.verdict == "FAIL"]
        last = failed[-1] if failed else Result(name, "", "FAIL", time.monotonic() - start)
        passed = [result for result in meter.results if result is not last]
        return [*passed, replace(last, reason=reason_of(error))]
    return meter.results


def reason_of(error: Exception) -> str:
    """Why a row failed."""
    is_own = isinstance(error, PipelineError)
    return error.format_message() if is_own else f"{type(error).__name__}: {error}"


def row_parameters(row: Row, rehearsal: bool) -> Tree:
    """All parameters of a row."""
    if rehearsal:
        return merged(parameters("tiny"), row.changes, REHEARSED)
    long = long_contexts() if row.environment == "tiny" else {}
    return merged(parameters(row.environment), long, row.changes, row.gpu_only)


def long_contexts(rows: int = 1200, vocabulary: int = 8192) -> Tree:
    """Parameters of long contexts: `LONG`, and a file of random words that is longer than they are.

    A model that reads them learns no end of a response, so it samples whole ones, too.
    """
    texts, draw = FOLDER / f"texts-{rows}.jsonl", random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(WORDS)]
    if not texts.exists():
        with texts.open("w") as file:
            for _ in range(rows):
                columns = {
                    name: " ".join(draw.choices(words, k=TOKENS + 8))
                    for name in ("prompt", "chosen", "rejected")
                }
                print(json.dumps(columns), file=file)
    sources = [{"name": "files", "path": str(texts)}]
    own = {"split": {"sources": sources}, "base_model": {"vocab_size": vocabulary}}
    return merged(LONG, own)


def run_tests(rehearsal: bool) -> list[Result]:
    """Run the tests that need a GPU.

    One that is skipped for another reason than a missing package fails, except in a rehearsal.
    """
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--color=no"]
    command += ["tests/models/test_self_check.py"] if rehearsal else []
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    (FOLDER / "tests.log").write_text(done.stdout + done.stderr)
    lines = done.stdout.splitlines() or ["no output"]
    skipped = [line for line in lines if line.startswith("SKIPPED")]
    ok = done.returncode == 0 and (rehearsal or all(map(OPTIONAL.search, skipped)))
    reason = "; ".join([lines[-1].strip("= "), *([] if rehearsal else skipped)])
    verdict = "pass" if ok else "FAIL"
    return [Result("tests", "pytest", verdict, time.monotonic() - start, reason=reason)]


def run_kills(rehearsal: bool) -> list[Result]:
    """Kill training on long contexts and resume it: the results must be equal bit for bit.

    A short row is a single block of an attention kernel, whose order of additions cannot vary.
    """
    start = time.monotonic()
    stages = ["sft"] if rehearsal else ["sft", "ppo"]
    options = ["--kills", "1", "--zero", "2", "--precision", "bf16", "--stages", *stages]
    if not rehearsal:
        options += ["--params", as_option(long_contexts(vocabulary=512))]
    command = [sys.executable, str(PROJECT / "benchmarks" / "kills.py"), *options]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    (FOLDER / "kills.log").write_text(done.stdout + done.stderr)
    kills = RESULTS / "kills" / "kills.json"
    rows = json.loads(kills.read_text()) if kills.is_file() else []
    wrong = [f"{row['stage']}: {name}" for row in rows for name in row if row[name] is False]
    reason = "; ".join(wrong) or ("" if done.returncode == 0 else f"see {FOLDER / 'kills.log'}")
    verdict, seconds = "pass" if done.returncode == 0 else "FAIL", time.monotonic() - start
    return [Result("resume", " and ".join(stages), verdict, seconds, reason=reason)]


def as_option(values: Tree) -> str:
    """Nested parameters as the value of `--params`; the YAML of a list in lines has no comma."""
    texts = {
        name: OmegaConf.to_yaml(OmegaConf.create(value)) if isinstance(value, list) else value
        for name, value in leaves(values)
    }
    return ",".join(f"{name}={text}" for name, text in texts.items())


def run_row(name: str, rehearsal: bool) -> list[Result]:
    """Run a row; an error of the row is its result."""
    others, start = {"tests": run_tests, "kills": run_kills}, time.monotonic()
    try:
        return others[name](rehearsal) if name in others else run_stages(name, rehearsal)
    except Exception as error:
        return [Result(name, "", "FAIL", time.monotonic() - start, reason=reason_of(error))]
