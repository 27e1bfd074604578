"""Answers without padding, one at a time, and single optimizer steps, for tests of losses."""

from __future__ import annotations

import deepspeed
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from rlhf_pipeline.distributed.batches import Rows, grouped
from rlhf_pipeline.distributed.engine import training_settings
from rlhf_pipeline.training.supervised import Setup

VOCABULARY = 288


def log_distributions(model, prompt: list[int], answer: list[int], temperature=1.0) -> Tensor:
    """Log-probability of each token of the vocabulary at each place of the answer, (R, V)."""
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return (logits[:, :VOCABULARY] / temperature).log_softmax(-1)


def token_logprobs(model, prompt: list[int], answer: list[int], temperature=1.0) -> Tensor:
    """Log-probability of each token of the answer, (R,)."""
    found = log_distributions(model, prompt, answer, temperature)
    return found.gather(1, torch.tensor(answer)[:, None]).squeeze(1)


def metrics_of_micro_batches(task, model, rows: dict, tokens: int, expected: Tensor) -> dict:
    """The metrics of a batch, whose loss and gradient have to be those of the loss by hand."""
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    batch, total, sums = task.collate(rows), 0.0, {}
    for index in grouped(batch.lengths, tokens, padded=False):
        loss, found = task.loss(model, batch.rows(index), task.weight(batch))
        loss.backward()
        total += loss.item()
        sums = {name: sums.get(name, 0.0) + value.item() for name, value in found.items()}
    assert total == pytest.approx(expected.item(), rel=1e-5)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)
    return task.metrics(sums)


def supervised_setup(engine, task, config, rows: dict, world) -> Setup:
    """What a step of a supervised stage needs; the same rows are held out."""
    table = Rows.of(pa.table(rows))
    return Setup(engine, task, config, training=table, validation=table, world=world, seed=1)


class Descent:
    """Engines of the ranks, whose step subtracts the gradient from each parameter."""

    def __init__(self, policies: list, settings) -> None:
        self._policies = policies
        self._start = {name: x.detach().clone() for name, x in policies[0].named_parameters()}
        config = training_settings(settings, hidden_size=32, on_gpu=False)
        self.engines = [
            deepspeed.initialize(
                model=policy,
                optimizer=torch.optim.SGD(policy.parameters(), lr=1.0),
                config=config | {"zero_allow_untested_optimizer": True},
            )[0]
            for policy in policies
        ]

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of each parameter, averaged over the ranks as DeepSpeed does."""
        return {
            name: sum(start - policy.get_parameter(name).detach() for policy in self._policies)
            / len(self._policies)
            for name, start in self._start.items()
        }
