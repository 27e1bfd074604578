"""How often the host waits for the device.

A wait costs little by itself, but the device then has no work until the host has queued some again.
"""

from collections import Counter

import pytest
from tiny_jobs import MAIN, tiny_job, trained


def own_waits(strict, phase: str) -> dict[int | None, int]:
    """The waits of a phase by step."""
    return Counter(wait.step for wait in strict.waits if wait.own and wait.phase == phase)


@pytest.mark.parametrize("program", ["sft", "dpo", "kto"])
def test_an_optimizer_step_of_supervised_training_waits_twice(
    strict, program_inputs, tmp_path, program
):
    """For its metrics, and for whether a rank received SIGTERM; four micro batches add nothing."""
    MAIN[program](tiny_job(program, program_inputs, tmp_path, trained(2) | {"evaluations": 1}))
    # The last step waits for its metrics here, and for SIGTERM after it has saved its model.
    assert own_waits(strict, "update") == {1: 2, 2: 1}


@pytest.mark.parametrize(
    "changes, optimizer_steps",
    [
        ({}, 2),
        ({"critic_warmup_steps": 1}, 1),
        ({"minibatch_size": 4, "ppo_epochs": 2, "kl": {"stop_update": 9.0}}, 8),
    ],
    ids=["one minibatch", "critic alone", "four minibatches"],
)
def test_an_optimizer_step_of_ppo_waits_at_most_twice(
    strict, program_inputs, tmp_path, changes, optimizer_steps
):
    """A rollout waits for its metrics, for SIGTERM, and with `stop_update` after each epoch."""
    blocks = {"actor": trained(1), "critic": trained(1), "evaluations": 1}
    MAIN["ppo"](tiny_job("ppo", program_inputs, tmp_path, blocks | changes))
    waits = own_waits(strict, "update")[1]
    assert waits == 2 + (2 if "kl" in changes else 0)
    assert waits <= 2 * optimizer_steps


def test_generation_waits_once_for_each_micro_batch_and_scoring_once_for_each_model(
    strict, program_inputs, tmp_path
):
    """Neither a generated token nor a packed forward pass waits, in no library.

    After 16 tokens, generation looks at which rows have finished. Scoring waits for its metrics and
    its moments, too; in the first step also for the mean that the critic's values get.
    """
    blocks = {
        "actor": trained(1), "critic": trained(1), "evaluations": 1, "micro_batch_tokens": 16,
        "sampling": {"max_response_tokens": 20, "batch_size_per_gpu": 4},
    }  # fmt: skip
    MAIN["ppo"](tiny_job("ppo", program_inputs, tmp_path, blocks))
    waits = Counter((wait.phase, wait.step) for wait in strict.waits)
    assert [waits["rollout", step] for step in (1, 2)] == [4, 4]  # two micro batches
    assert [waits["scoring", step] for step in (1, 2)] == [4 + 2 + 1, 4 + 2]
