"""Do the GPUs of this machine reach what other projects publish? Sources: docs/acceptance.md.

    make acceptance                               # all tests, on all GPUs that it may use
    make acceptance ARGS="--tests ppo dpo"        # some tests
    make acceptance ARGS=--rehearse               # toy sizes on the CPU, to test this script

A test is a `kedro run`: finished stages are reused, and an interrupted one resumes. The exit code
is 1 if a figure misses its limits. A rehearsal learns nothing, so its rewards and accuracies do.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rlhf_pipeline import run
from rlhf_pipeline.api import RunResults
from rlhf_pipeline.errors import ArtifactError, PipelineError

PROJECT = Path(__file__).parents[1]
Tree = dict[str, Any]
GAIN = {"lower end of the gain": (0.0, inf)}


class Test(NamedTuple):
    """A run, and the limits between which its figures must lie."""

    env: str
    model: str
    policy: str
    """The stage that trains, and the name of its pipeline; PPO is part of the pipeline full."""
    last: str
    """The last node of the run: no test registers a model."""
    expected: Mapping[str, tuple[float, float]]
    params: Mapping[str, Any] = {}


TESTS = {
    "ppo": Test(
        *("gsm8k", "Qwen/Qwen2.5-1.5B-Instruct", "ppo", "evaluate"),
        {"last reward": (0.75, inf), "accuracy after": (0.65, inf), "minutes of all steps": (0, 60)}
        | GAIN,
    ),
    "grpo": Test(
        *("gsm8k", "Qwen/Qwen2.5-0.5B-Instruct", "grpo", "evaluate_grpo"),
        {"accuracy after": (0.567, inf)} | GAIN,
        {"evaluate.sampling.temperature": 0},
    ),
    "speed": Test(
        *("gsm8k", "meta-llama/Llama-3.2-1B-Instruct", "grpo", "grpo"),
        {"seconds of a step": (0, 10)},
        {
            "grpo.steps": 20,
            "grpo.rollout_batch_size": 512,
            "grpo.responses_per_prompt": 16,
            "grpo.minibatch_size": 512,
            "grpo.evaluations": 1,
        },
    ),
    "dpo": Test(
        *("llama-3.2-1b-dpo", "meta-llama/Llama-3.2-1B-Instruct", "dpo", "dpo"),
        {"first loss": (0.69314, 0.69316)},
    ),
}


def main() -> int:
    """Run the tests one after the other; print what each found and what misses its limits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", nargs="+", choices=TESTS, default=[*TESTS])
    parser.add_argument("--rehearse", action="store_true", help="tiny models and data on the CPU")
    given, missed = parser.parse_args(), []
    with tempfile.TemporaryDirectory() as folder:
        if given.rehearse:
            os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        for name in given.tests:
            test = TESTS[name]
            params = {"base_model.path": test.model} | test.params
            params |= rehearsal(test, Path(folder)) if given.rehearse else {}
            pipeline = "full" if test.policy == "ppo" else test.policy
            try:
                results = run(
                    pipeline, params=params, env=test.env, project=PROJECT, to_nodes=[test.last]
                )
                found = figures(results, test.policy)
            except PipelineError as error:
                missed.append(f"{name}: {error.format_message()}")
                continue
            print(f"{name}:", ", ".join(f"{what} {value:.6g}" for what, value in found.items()))
            missed += [f"{name}: {fault}" for fault in faults(found, test.expected)]
    print("\n".join(missed or [f"{', '.join(given.tests)}: all figures are within their limits"]))
    return 1 if missed else 0


def figures(results: RunResults, policy: str) -> dict[str, float]:
    """What a run found: its times, first loss, last reward, and right answers where it has any."""
    lines = [line["metrics"] for line in results.metrics(policy)]

    def curve(metric: str) -> list[float]:
        return [line[metric] for line in lines if metric in line]

    seconds, losses = curve("time/step_s"), curve(f"{policy}/loss")
    found = {"minutes of all steps": sum(seconds) / 60, "seconds of a step": fmean(seconds[-5:])}
    found["first loss" if losses else "last reward"] = (losses or curve("objective/score")[::-1])[0]
    try:
        evaluation = results.evaluation
    except ArtifactError:  # the run ends before
        return found
    policies, accuracy = evaluation["policies"], "lenient_accuracy"
    return found | {
        "accuracy before": next(iter(policies.values()))[accuracy],
        "accuracy after": policies[evaluation["candidate"]][accuracy],
        "lower end of the gain": evaluation["changes"][accuracy]["lower"],
    }


def faults(found: Mapping[str, float], expected: Mapping[str, tuple[float, float]]) -> list[str]:
    """A line for each figure that is missing or not between its limits."""
    return [
        f"{what}: found {found.get(what, 'none')}, expected above {low}"
        + (f" and below {high}" if high < inf else "")
        for what, (low, high) in expected.items()
        if not low < found.get(what, -inf) < high
    ]


def rehearsal(test: Test, folder: Path) -> Tree:
    """Parameters in place of those of a test: a tiny model of the same family, sums, few steps."""
    sums = [(f"What is {n} + {n % 7}?", n + n % 7) for n in range(200)]
    if test.policy == "dpo":
        source = "Dahoas/rm-static"
        ends = {"chosen": " Yes.", "rejected": " No."}
        rows = [{"prompt": f"\n\nHuman: {q}\n\nAssistant:"} | ends for q, _ in sums]
    else:
        source = "openai/gsm8k"
        rows = [{"question": q, "answer": f"It is {a}.\n#### {a}"} for q, a in sums]
    file = folder / f"{test.policy}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampling, sizes = {"max_response_tokens": 8}, {"hidden_size": 32, "num_hidden_layers": 2}
    few: Tree = {"batch_size": 8, "epochs": 0.2, "evaluations": 1}
    if test.policy != "dpo":
        few = {"steps": 2, "rollout_batch_size": 16, "minibatch_size": 8, "sampling": sampling}
        few |= {"responses_per_prompt": 4 if test.policy == "grpo" else 1, "evaluations": 1}
        few |= {"evaluation_prompts": 8}
    family = {"model_type": "llama" if "Llama" in test.model else "qwen2"}
    model = {"path": None, "vocab_size": 512, "architecture": family | sizes}
    data = {"sources": [{"name": source, "path": str(file)}], "test_fraction": 0.1}
    return {
        "root": str(folder),
        "base_model": model,
        "split": data,
        test.policy: few,
        "evaluate": {"prompts": 16, "sampling": sampling},
        "launch": {"processes": 2},
    }


if __name__ == "__main__":
    raise SystemExit(main())
