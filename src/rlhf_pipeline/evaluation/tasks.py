"""Stage program: the lm-evaluation-harness lets a policy do its tasks.

    python -m rlhf_pipeline.evaluation.tasks job.json

It is one process. It ends before the ranks of the evaluation start, so no rank waits for it.
"""

import json
import math
import os
from collections.abc import Iterator
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from rlhf_pipeline.config.evaluate import TASK_RESULTS, EvaluateConfig, TasksConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.models.loading import DTYPES, load_tokenizer, plain_generation, saved_precision
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.program import run_program


def main(job: LaunchedJob) -> dict[str, float]:
    """Write what a policy and its average, "_ema", achieved: task, metric, value and shares.

    All policies get the same examples before a question, and the same random numbers.
    """
    tasks, policy = job.block("tasks", TasksConfig), job.inputs["policy"]
    precision = job.block("evaluate", EvaluateConfig).precision
    tokenizer = load_tokenizer(policy, trust_remote_code=job.trust_remote_code)
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    manager = TaskManager(include_defaults=len(tasks.files) < len(tasks.names))
    achieved = {}
    for ending, folder in (("", policy), ("_ema", policy / "ema")):
        if folder.is_dir():
            found = simple_evaluate(
                _model(
                    folder,
                    tokenizer=tokenizer,
                    batch_size=tasks.batch_size_per_gpu,
                    dtype=DTYPES[precision or saved_precision(folder)],
                    trust_remote_code=job.trust_remote_code,
                ),
                tasks=[*tasks.names],
                task_manager=manager,
                num_fewshot=tasks.few_shot,
                limit=tasks.limit,
                bootstrap_iters=0,
                apply_chat_template=bool(tokenizer.chat_template),
                **dict.fromkeys(seeds, job.seed),
            )
            achieved[ending] = [*_measured(found)]
    job.export.mkdir(exist_ok=True)
    (job.export / TASK_RESULTS).write_text(json.dumps(achieved))
    return {}


def _model(folder: Path, **how: Any) -> HFLM:
    """A policy as the harness sees it, spread over the GPUs."""
    contract, is_hidden = TokenContract.read(folder), os.environ.get("DS_ACCELERATOR") == "cpu"
    gpus = 0 if is_hidden else torch.cuda.device_count()
    device = {"device": "cuda" if gpus else "cpu", "parallelize": gpus > 1}
    found = HFLM(str(folder), softmax_dtype="float32", use_safetensors=True, **device, **how)
    found.model.generation_config = plain_generation(contract)

    def without_unused_rows(model: Any, arguments: Any, output: Any) -> Any:
        output.logits = output.logits[..., : contract.vocab_size]
        return output

    found.model.register_forward_hook(without_unused_rows)
    return found


def _measured(found: dict[str, Any]) -> Iterator[tuple[str, str, float, list[float] | None]]:
    """Task, metric, its value, and the values of the documents if the metric is their mean, lies
    from 0 to 1, and is better if higher. A group that has metrics replaces its tasks."""
    children = found["group_subtasks"]
    inside = {child for group in found.get("groups", ()) for child in children[group]}
    for name in sorted(found["results"].keys() - inside):
        parts = [name]
        for part in parts:
            parts += children.get(part, ())
        samples = [each for part in parts for each in found["samples"].get(part, ())]
        for key, value in found["results"][name].items():
            metric, comma, answers = key.partition(",")
            if comma and isinstance(value, Real) and math.isfinite(value):
                given = [each.get(metric) for each in samples if each["filter"] == answers]
                shares = [float(v) for v in given if isinstance(v, Real) and 0 <= float(v) <= 1]
                is_share = len(given) > 1 and len(shares) == len(given)
                is_share = is_share and math.isclose(sum(shares) / len(shares), float(value))
                is_good = is_share and found["higher_is_better"][name].get(metric)
                label = metric if answers == "none" else f"{metric}/{answers}"
                yield name, label, float(value), shares if is_good else None


if __name__ == "__main__":
    run_program(main)
