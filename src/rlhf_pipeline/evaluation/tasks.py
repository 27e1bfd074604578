"""Tasks of the lm-evaluation-harness. Only evaluations with `evaluate.tasks` import this module."""

import logging
import math
import re
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any

import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor, nn
from transformers import set_seed

from rlhf_pipeline.config.evaluate import TasksConfig
from rlhf_pipeline.distributed.zero import for_generation
from rlhf_pipeline.errors import StageError, without_secrets
from rlhf_pipeline.evaluation.answering import Setup
from rlhf_pipeline.evaluation.comparison import baseline_of, with_ends
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.statistics import mean_with_interval, share_with_interval

Measured = tuple[float, list[float] | None]
"""A metric, and its value for each document if the metric is their mean, lies from 0 to 1, and is
better if higher; otherwise None."""


class SharedPolicy(HFLM):
    """A policy as the harness sees it; each rank answers its share of the documents."""

    def __init__(self, model: nn.Module, setup: Setup, batch_size: int) -> None:
        tokenizer = setup.tokenizer
        super().__init__(model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype="float32")
        self._world = setup.world
        self._rank, self._world_size = setup.world.rank, setup.world.size

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.tensor(self._world.gather(int(tensor)))

    def gather_object(self, obj: dict[str, Any], dst: int = 0) -> list[dict[str, Any]]:
        """The samples by task, or the results by task, metric and filter, of all ranks.

        They travel as JSON: the harness itself would unpickle what any process sends.
        """
        if any(isinstance(found, list) for found in obj.values()):
            kept = {task: [_read_fields(each) for each in found] for task, found in obj.items()}
            return self._world.gather(kept)
        parts = self._world.gather({task: [*found.items()] for task, found in obj.items()})
        return [{task: {tuple(k): v for k, v in part[task]} for task in part} for part in parts]

    def barrier(self) -> None:
        self._world.barrier()


class Tasks:
    """The tasks of an evaluation, and what each policy achieved."""

    def __init__(self, config: TasksConfig, setup: Setup) -> None:
        """Load the tasks with their documents.

        Raises StageError if the harness cannot load one, or it has fewer documents than ranks.
        """
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        names, from_harness = [*config.names], len(config.files) < len(config.names)
        try:
            loaded = TaskManager(include_defaults=from_harness).load(names)
            numbers = {name: len(task.eval_docs) for name, task in loaded["tasks"].items()}
        except Exception as error:  # the harness and its libraries have no common base class
            raise StageError(
                f"evaluate.tasks.names: the harness did not load {', '.join(names)}: "
                f"{type(error).__name__}: {without_secrets(str(error))}. Fix: correct the file of "
                "the task; for data on the hub, check the network"
            ) from error
        for name, task in loaded["tasks"].items():
            shots = task.get_config("num_fewshot")
            if shots is None or (shots and config.few_shot is not None):
                task.set_config("num_fewshot", config.few_shot or 0)
            documents = min(numbers[name], config.limit or numbers[name])
            if documents < setup.world.size:
                raise StageError(
                    f"evaluate.tasks: found {documents} documents of {name}, expected one for each "
                    f"of {setup.world.size} ranks. Fix: raise limit, or remove the task"
                )
        self._loaded, self._config, self._setup = loaded, config, setup
        self._results: dict[str, dict[tuple[str, str], Measured]] = {}

    def do(self, policy: nn.Module, name: str) -> None:
        """Let a policy do the tasks. All ranks call this together.

        All policies get the same examples before a question, and the same random numbers.
        """
        setup, config = self._setup, self._config
        set_seed(setup.seed)
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(setup.seed)

        def after_forward(model: nn.Module, arguments: Any, output: Any) -> Any:
            heartbeat.tick()
            output.logits = output.logits[..., : setup.contract.vocab_size]
            return output

        with for_generation(policy) as model, torch.no_grad():
            hook = model.register_forward_hook(after_forward)
            found = evaluate(
                SharedPolicy(model, setup, config.batch_size_per_gpu),
                self._loaded,
                limit=config.limit,
                bootstrap_iters=0,
                apply_chat_template=bool(setup.tokenizer.chat_template),
                fewshot_as_multiturn=True,
            )
            hook.remove()
        if found is not None:  # the first rank
            self._results[name] = dict(_measured(found, self._loaded["groups"]))

    def add_to(self, evaluation: dict[str, Any]) -> None:
        """Add the metrics of each policy, `tasks/<task>/<metric>`, and the change of each task.

        A change is that of the first metric that is a share, from SFT to the candidate. Its
        interval is that of the differences on the same documents.
        """
        for policy, results in self._results.items():
            for (task, metric), (value, shares) in results.items():
                name = re.sub(r"[^\w./-]", "_", f"tasks/{task}/{metric}")  # MLflow refuses others
                measured = {name: value}
                if shares:
                    is_share = {*shares} <= {0.0, 1.0}
                    measure = share_with_interval if is_share else mean_with_interval
                    measured = with_ends(name, (value, *measure(shares)[1:]))
                evaluation["policies"][policy] |= measured
        changes = evaluation["tasks"] = {}
        for key, (value, ours) in self._results[evaluation["candidate"]].items():
            (task, metric), before = key, self._results[baseline_of(evaluation)]
            _, theirs = before.get(key, (value, None))
            if task not in changes and ours and theirs:
                pairs = zip(ours, theirs, strict=True)
                change, lower, upper = mean_with_interval([a - b for a, b in pairs])
                changes[task] = {"metric": metric, "value": value, "n": len(ours)}
                changes[task] |= {"change": change, "lower": lower, "upper": upper}


def _measured(
    found: dict[str, Any], groups: dict[str, Any]
) -> Iterator[tuple[tuple[str, str], Measured]]:
    """Task and metric, and its values; a group that has metrics replaces its tasks."""
    inside = {child for name in found.get("groups", ()) for child in groups[name].child_names}
    for name in sorted(found["results"].keys() - inside):
        parts = [t.task_name for t in groups[name].get_all_tasks()] if name in groups else [name]
        samples = [each for part in parts for each in found["samples"][part]]
        for key, value in found["results"][name].items():
            metric, comma, answers = key.partition(",")
            if comma and isinstance(value, Real) and math.isfinite(value):
                given = [each.get(metric) for each in samples if each["filter"] == answers]
                shares = _shares(given, float(value))
                is_good = found["higher_is_better"][name].get(metric)
                label = metric if answers == "none" else f"{metric}/{answers}"
                yield (name, label), (float(value), shares if is_good else None)


def _read_fields(sample: dict[str, Any]) -> dict[str, Any]:
    """The fields of a sample that `_measured` reads."""
    return {k: v for k, v in sample.items() if k == "filter" or isinstance(v, Real)}


def _shares(values: Sequence[Any], mean: float) -> list[float] | None:
    """The values as numbers if all are from 0 to 1 and have this mean, else None."""
    shares = [float(v) for v in values if isinstance(v, Real) and 0 <= float(v) <= 1]
    is_mean = len(shares) > 1 and math.isclose(sum(shares) / len(shares), mean)
    return shares if is_mean and len(shares) == len(values) else None
