"""PPO in fp16 on two ranks of the lab: how actor and critic meet gradients that overflow."""

import functools
from unittest.mock import patch

import pytest
import torch
from tiny_jobs import logged, tiny_job, trained

from rlhf_pipeline.distributed.zero import get_accelerator, whole_state_dict
from rlhf_pipeline.rl import losses
from rlhf_pipeline.training import ppo, ppo_update

CASES = {"fp16": ()}
OVERFLOWS = {3: "actor", 4: "actor", 6: "critic", 7: "critic"}
"""Steps in which gradients overflow on the first rank, and the model they belong to."""
SCALE = 256.0
"""Initial loss scale. At the usual 65536, the first gradients of the critic overflow."""
STEPS = 8


def case(lab):
    """The metrics of each step; whether actor and critic moved in it, and their learning rates."""
    update_models, step, log = ppo.update_models, 0, []

    def overflowing(loss, model):
        @functools.wraps(loss)
        def changed(*arguments, **options):
            total, count = loss(*arguments, **options)
            overflows = OVERFLOWS.get(step) == model and lab.world.rank == 0
            return total * 1e30 if overflows else total, count

        return changed

    def recorded(models, *arguments, **options):
        nonlocal step
        step += 1
        engines = (models.actor, models.critic)
        if step == 1:
            for engine in engines:
                engine.optimizer.loss_scaler.cur_scale = SCALE
        before = [
            {name: value.clone() for name, value in whole_state_dict(engine.module).items()}
            for engine in engines
        ]
        metrics = update_models(models, *arguments, **options)
        after = [whole_state_dict(engine.module) for engine in engines]
        moved = [
            any(not torch.equal(was[name], new[name]) for name in was)
            for was, new in zip(before, after, strict=True)
        ]
        types = {str(value.dtype) for weights in after for value in weights.values()}
        rates = [engine.get_lr()[0] for engine in engines]
        log.append({"moved": moved, "types": [*types], "rates": rates})
        return metrics

    frozen = {"deepspeed": {"precision": "fp16"}}
    changes = {
        "steps": STEPS, "evaluations": 1, "reference": frozen, "reward_model": frozen,
        "actor": trained(2, "fp16"), "critic": trained(3, "fp16"),
    }  # fmt: skip
    with (
        patch.object(get_accelerator(), "is_fp16_supported", lambda: True, create=True),
        patch.object(ppo, "update_models", recorded),
        patch.object(losses, "policy_loss", overflowing(losses.policy_loss, "actor")),
        patch.object(ppo_update, "value_loss", overflowing(ppo_update.value_loss, "critic")),
    ):
        ppo.main(tiny_job("ppo", lab.inputs, lab.folder, changes))
    lab.world.barrier()
    return {"log": log, "metrics": logged(lab.folder)}


@pytest.mark.long
def test_in_fp16_actor_and_critic_skip_the_same_steps(cells):
    """If the gradients of one overflow, both skip the step; only the scale of that one falls."""
    log, lines = cells["fp16"]["log"], cells["fp16"]["metrics"]
    assert len(log) == len(lines) == STEPS
    for step, (entry, line) in enumerate(zip(log, lines, strict=True), start=1):
        is_taken = step not in OVERFLOWS
        assert entry["types"] == ["torch.float16"] and entry["moved"] == [is_taken] * 2
        assert entry["rates"][0] == entry["rates"][1]
        skipped = sum(overflow <= step for overflow in OVERFLOWS)
        for model in ("actor", "critic"):
            assert line[f"optim/{model}_skipped_steps"] == skipped
            assert (f"optim/{model}_grad_norm" in line) == is_taken
    # Hysteresis 2: the first overflow has no effect, the second halves the scale of that model.
    scales = [(line["optim/actor_loss_scale"], line["optim/critic_loss_scale"]) for line in lines]
    assert scales == [(256, 256)] * 3 + [(128, 256)] * 3 + [(128, 128)] * 2
