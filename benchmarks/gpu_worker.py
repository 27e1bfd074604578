"""Measures rows of `gpu.py`, one after another, on the ranks that it starts.

    python benchmarks/gpu_worker.py '{"part": "trainer", "rows": ["0.6B at 8k"], "toy": false, ...}'

It runs what the stage programs run, in this process, on random weights: no download, no Kedro. The
first rank appends a line of JSON for each row to the file `results`.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_rows
import pyarrow as pa
import torch
from gpu_models import (
    SEED,
    Model,
    SkipError,
    card,
    make_model,
    make_reward_model,
    memory_beside,
    peak_gib,
    planned_gib,
    random_ids,
    release,
    world,
    write_prompts,
)
from gpu_rows import FOLDER, Row, Tree

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.training import SamplingConfig, SFTConfig
from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.sizing.memory import Lengths

STEPS = 5
"""Steps of a row; all but the first are measured."""


class EnoughError(Exception):
    """All steps are taken."""


def self_check(settings: Tree) -> Tree:
    """Kernels beside a CPU in float32; raises StageError if one differs."""
    from rlhf_pipeline.models.kernels import check

    found = check(world().device, settings["precision"])
    worst = max(found, key=lambda each: each.error / each.bound)
    return {"kernels": len(found), "worst": worst.kernel, "error": worst.error, "of": worst.bound}


def generation(settings: Tree) -> Tree:
    """Responses to random prompts, all of them at once."""
    from rlhf_pipeline.generation.generator import load_generator
    from rlhf_pipeline.models.loading import freeze, load_policy

    rows, prompt, response = (settings[name] for name in ("rows", "prompt", "response"))
    model = make_model(settings, prompt + response)
    release()
    policy = freeze(load_policy(model.folder, "bf16", device=world().device))
    whole = SamplingConfig(max_response_tokens=response, batch_size_per_gpu=rows)
    generator = load_generator(
        settings.get("generator", "transformers"), whole, lambda: prompt, policy=policy,
        contract=model.contract, world=world(), gather=True, hybrid=None, place="generator",
    )  # fmt: skip
    prompts = random_ids(rows, prompt, model)

    def seconds(sampling: SamplingConfig, key: int) -> tuple[float, int]:
        start = time.perf_counter()
        rollout = generator.generate(prompts, sampling, [(key, n) for n in range(rows)])
        return time.perf_counter() - start, int(rollout.sequences.real_mask.sum())

    first, _ = seconds(whole, 0)
    runs = [seconds(whole, key) for key in (1, 2, 3)]
    one = min(
        seconds(SamplingConfig(max_response_tokens=1, batch_size_per_gpu=rows), key)[0]
        for key in (4, 5)
    )
    took = statistics.median(run[0] for run in runs)
    step = (took - one) / (response - 1)
    found: Tree = {
        "tokens/s": statistics.median(tokens / spent for spent, tokens in runs),
        "ms a token": 1e3 * step, "prompt, ms": 1e3 * one, "first rollout, s": first,
        "peak, GiB": peak_gib(),
    }  # fmt: skip
    if (limits := gpu_rows.limits_of(card())) is not None:
        read = gpu_rows.bytes_of_token(model.shape, rows, prompt, response)
        found["of the bandwidth, %"] = 100 * gpu_rows.share_of_bandwidth(read, step, limits[1])
    return found


def ppo_config(settings: Tree, ranks: int) -> tuple[PPOConfig, Lengths]:
    """The parameters of PPO, and the lengths of its rows."""
    batch, prompt, response = (settings[name] for name in ("batch", "prompt", "response"))
    batch = max(batch, ranks)
    one = {
        "optimizer": {"learning_rate": 1e-6, "warmup_fraction": 0.0},
        "deepspeed": settings["deepspeed"],
    } | settings.get("changes", {})
    config = PPOConfig.model_validate(
        {
            "steps": 1000, "rollout_batch_size": batch, "minibatch_size": batch, "actor": one,
            "critic": one, "evaluations": 1, "generator": settings.get("generator", "transformers"),
            "micro_batch_tokens": settings.get("tokens", 16384),
            "offload_during_rollout": settings.get("offload", False),
            "sampling": {"max_response_tokens": response, "batch_size_per_gpu": batch},
        }
    )  # fmt: skip
    return config, Lengths(prompt, response)


def ppo(settings: Tree) -> Tree:
    """Iterations of PPO, without evaluations and checkpoints."""
    from rlhf_pipeline.data.token_contract import common_contract
    from rlhf_pipeline.runtime.job import LaunchedJob
    from rlhf_pipeline.runtime.metrics_file import read_json_lines
    from rlhf_pipeline.training.ppo import train
    from rlhf_pipeline.training.ppo_setup import Setup, set_up

    config, lengths = ppo_config(settings, world().size)
    batch, steps = config.rollout_batch_size, settings.get("steps", STEPS)
    prompt = lengths.prompt
    model = make_model(settings, prompt + settings["response"])
    planned = planned_gib("ppo", config, lengths, model)
    inputs = {
        "sft_model": model.folder, "reward_model": make_reward_model(model),
        "prompts": write_prompts(random_ids(4 * batch, prompt, model), model),
    }  # fmt: skip
    folder = FOLDER / "job"
    folder.mkdir(parents=True, exist_ok=True)
    if world().rank == 0:
        (folder / "metrics.jsonl").unlink(missing_ok=True)
    world().barrier()

    @dataclass(frozen=True)
    class Limited(Setup):
        """Ends where PPO would save a checkpoint."""

        def save(self, step: int, *, due: bool, kl_coef: float) -> None:
            if step == steps:
                raise EnoughError

    release()
    job = LaunchedJob("ppo", "f", SEED, {}, inputs, {}, folder, 600.0)
    try:
        train(Limited(**vars(set_up(job, config, common_contract(inputs), world()))))
    except EnoughError:
        memory = memory_beside(planned)
        world().barrier()
    taken = [line["metrics"] for line in read_json_lines(folder / "metrics.jsonl")]
    first, measured = taken[0]["time/step_s"], taken[1:]
    step, sampling_s = (
        statistics.median(each[f"time/{name}_s"] for each in measured)
        for name in ("step", "generation")
    )
    tokens = batch * measured[-1]["rollout/response_tokens"]
    return {
        "iteration, ms": 1e3 * step, "generation, ms": 1e3 * sampling_s,
        "rest, ms": 1e3 * (step - sampling_s), "sampled tokens/s": tokens / sampling_s,
        "first, s": first,
    } | memory  # fmt: skip


def sft_config(settings: Tree, ranks: int) -> tuple[SFTConfig, Lengths]:
    """The parameters of SFT, and the lengths of its rows."""
    batch, prompt, response = max(settings["batch"], ranks), 8, settings["length"] - 8
    config = SFTConfig.model_validate(
        {
            "optimizer": {"learning_rate": 1e-5, "warmup_fraction": 0.0},
            "deepspeed": settings["deepspeed"],
            "batch_size": batch, "micro_batch_tokens": settings["tokens"],
        }
        | settings.get("changes", {})
    )  # fmt: skip
    return config, Lengths(prompt, response)


@dataclass(frozen=True)
class Training:
    """SFT of random rows."""

    setup: Any
    model: Model
    planned: float
    tokens: int
    """Of an optimizer step, over all ranks."""

    @classmethod
    def of(cls, settings: Tree) -> Training:
        from rlhf_pipeline.distributed.batches import Rows
        from rlhf_pipeline.distributed.engine import train_engine
        from rlhf_pipeline.models.loading import load_policy
        from rlhf_pipeline.training.sft import SFTTask
        from rlhf_pipeline.training.supervised import Setup

        config, lengths = sft_config(settings, world().size)
        prompt, length, batch = lengths.prompt, lengths.row, config.batch_size
        model = make_model(settings, length)
        planned = planned_gib("sft", config, lengths, model)
        release()
        engine = train_engine(partial(load_policy, model.folder), config, 1000)
        ids = random_ids(4 * batch, length, model)
        table = pa.table(
            {"prompt_ids": [row[:prompt] for row in ids],
             "response_ids": [row[prompt:] for row in ids],
             "loss_mask": [[True] * (length - prompt)] * len(ids)}
        )  # fmt: skip
        rows = Rows.of(table)
        task = SFTTask(model.contract, "sft")
        setup = Setup(engine, task, config, rows, rows, world(), SEED)
        return cls(setup, model, planned, batch * length)

    def steps(self, numbers: Sequence[int]) -> tuple[list[float], list[float]]:
        """Take steps; return the seconds and the loss of each. A step ends with a look at both."""
        from rlhf_pipeline.training.supervised import train_step

        seconds, losses = [], []
        for number in numbers:
            start = time.perf_counter()
            losses.append(train_step(self.setup, number)["sft/loss"])
            seconds.append(time.perf_counter() - start)
        return seconds, losses


def sft(settings: Tree) -> Tree:
    """Optimizer steps of SFT."""
    training = Training.of(settings)
    seconds, losses = training.steps(range(1, settings.get("steps", STEPS) + 1))
    step = statistics.median(seconds[1:])
    found: Tree = {"tokens/s": training.tokens / step, "step, ms": 1e3 * step}
    if (limits := gpu_rows.limits_of(card())) is not None:
        adapters, shape = training.setup.config.lora is not None, training.model.shape
        flops = gpu_rows.training_flops(shape, training.tokens, settings["length"], adapters)
        found["MFU, %"] = 100 * gpu_rows.mfu(flops, step, limits[0], world().size)
    found |= {"first loss": losses[0], "last loss": losses[-1]}
    return found | memory_beside(training.planned)


def resume(settings: Tree) -> Tree:
    """Four steps, and two from the checkpoint after the second: equal losses and equal weights."""
    from rlhf_pipeline.distributed.engine_state import load_engine, save_engine

    folder = FOLDER / "checkpoint"
    if world().rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    found = []
    for attempt in ("whole", "resumed"):
        training = Training.of(settings)
        setup = replace(training.setup, world=replace(world(), deterministic=True))
        training = replace(training, setup=setup)
        if attempt == "whole":
            training.steps((1, 2))
            save_engine(setup.engine, folder)
            world().barrier()
        else:
            load_engine(setup.engine, folder)
        _, losses = training.steps((3, 4))
        parameters = setup.engine.module.parameters()
        sums = [getattr(each, "ds_tensor", each).detach().cpu().clone() for each in parameters]
        found.append((losses, sums))
    (losses, weights), (again, same) = found
    equal = all(map(torch.equal, weights, same))
    if losses != again or not equal:
        raise PipelineError(
            f"found losses {again} and {'equal' if equal else 'other'} weights after a resume, "
            f"expected losses {losses} and equal weights"
        )
    return {"losses": "equal", "weights": "equal bit for bit", "loss": losses[-1]}


def staged(settings: Tree) -> list[Tree]:
    """Rows that start the project's own commands; one result for each stage."""
    from gpu_stages import run_row

    name = settings["name"] if settings["kind"] == "stages" else settings["kind"]
    found = run_row(name, settings["toy"])
    return [
        {"row": f"{each.row}: {each.stage}" if each.stage else each.row, "verdict": each.verdict,
         "seconds": each.seconds, "reason": each.reason,
         "values": {"speed": each.rate} | (
             {} if each.peak_mib is None else {"peak, GiB": each.peak_mib / 1024})}
        for each in found
    ]  # fmt: skip


KINDS: dict[str, Callable[[Tree], Tree]] = {
    "self_check": self_check, "generation": generation, "ppo": ppo, "sft": sft, "resume": resume,
}  # fmt: skip


def measured(row: Row, toy: bool) -> list[Tree]:
    """The results of a row; an error is one, too."""
    settings = gpu_rows.settings_of(row, toy=toy)
    start = time.perf_counter()
    try:
        if row.kind not in KINDS:
            return staged(settings)
        result: Tree = {"verdict": "pass", "values": KINDS[row.kind](settings)}
    except SkipError as reason:
        result = {"verdict": "skip", "reason": str(reason)}
    except PipelineError as error:
        result = {"verdict": "FAIL", "reason": error.format_message()}
    except Exception as error:  # the other rows can still run
        result = {"verdict": "FAIL", "reason": f"{type(error).__name__}: {error}"}
    return [{"row": row.name, "seconds": time.perf_counter() - start} | result]


def main() -> None:
    """Measure the rows of the command line."""
    given = json.loads(sys.argv[1])
    rows = {row.name: row for row in gpu_rows.PARTS[given["part"]].rows}
    for name in given["rows"]:
        results = measured(rows[name], given["toy"])
        if given["first"]:
            with Path(given["results"]).open("a") as file:
                for result in results:
                    print(json.dumps({"of": name} | result), file=file)


if __name__ == "__main__":
    main()
