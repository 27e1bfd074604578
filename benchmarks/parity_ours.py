"""A stage program of this project on the parity task; started by `parity.py`.

Writes final/ and steps.json, the numbers of each step, into the folder of the job.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import parity_task
from parity_recipe import base, ours
from parity_task import LABELLED, PAIRS

from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training import dpo, kto, ppo

NAMES = {
    "dpo": {"accuracy": "dpo/accuracy", "margin": "dpo/margin", "loss": "dpo/loss"},
    "kto": {"loss": "kto/loss", "good": "kto/good_reward"},
    "distill": {"kl": "objective/kl", "tokens": "rollout/response_tokens"},
    "ppo": {"score": "objective/score", "kl": "objective/kl", "tokens": "rollout/response_tokens"},
}
INPUTS = {
    "dpo": {"sft_model", "comparisons"},
    "kto": {"sft_model", "comparisons", "labelled"},
    "distill": {"sft_model", "teacher", "prompts"},
    "ppo": {"sft_model", "reward_model", "prompts"},
}
PROGRAMS = {"dpo": dpo, "kto": kto}
ROWS = {"kto": 2 * PAIRS + LABELLED}

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    name, folder = given["method"], Path(given["folder"])
    method = base(name)
    stage = {"rloo": "grpo"}.get(method, method)
    wanted = INPUTS.get(method, {"sft_model", "prompts"})
    inputs = {name: Path(path) for name, path in given["inputs"].items() if name in wanted}
    if method in ("grpo", "rloo"):
        inputs["rewards.0"] = Path(parity_task.__file__)
    config = {stage: ours(name, ROWS.get(method, PAIRS))}
    job = LaunchedJob(stage, "f", given["seed"], config, inputs, {}, folder, 3600.0)
    PROGRAMS.get(method, ppo).main(job)
    if os.environ["RANK"] != "0":
        raise SystemExit
    job.export.rename(folder / "final")
    steps = [json.loads(line)["metrics"] for line in job.metrics_file.read_text().splitlines()]
    names = NAMES.get(method, NAMES["ppo"])
    found = [{name: step[own] for name, own in names.items()} for step in steps]
    (folder / "steps.json").write_text(json.dumps(found))
