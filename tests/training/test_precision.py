"""SFT and PPO in bf16 and fp16.

Two real ranks run this file as a program under DeepSpeed's launcher, all settings in one launch.
"""

import functools
import json
import math
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from rank_fixtures import write_table

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.distributed.zero import whole_state_dict
from rlhf_pipeline.generation import transformers_generator
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.rl import losses
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training import ppo, ppo_update, sft

STEPS = 4
SETTINGS = {"fp32": ("fp32", 2, 2), "bf16, ZeRO-2": ("bf16", 2, 2), "bf16, ZeRO-3": ("bf16", 3, 3)}
OVERFLOWS = {3: "actor", 4: "actor", 6: "critic", 7: "critic"}
"""Steps of the fp16 run in which gradients overflow on one rank, and the model they belong to."""
SCALE = 256.0
"""Initial loss scale. At the usual 65536, the first gradients of the critic overflow."""
FP16_STEPS = 8


def trained(precision: str, stage: int) -> dict[str, object]:
    return {
        "optimizer": {"learning_rate": 1e-3, "warmup_fraction": 0.0},
        "deepspeed": {"zero_stage": stage, "precision": precision},
    }


def run_ppo(
    name: str,
    precision: str,
    stages: tuple[int, int],
    steps: int,
    inputs: dict[str, Path],
    folder: Path,
) -> None:
    """Run the whole stage with all four models in one precision."""
    frozen = {"deepspeed": {"precision": precision}}
    config = PPOConfig.model_validate(
        {
            "steps": steps, "rollout_batch_size": 8, "minibatch_size": 8,
            "micro_batch_tokens": 32, "evaluations": 1,
            "sampling": {"max_response_tokens": 6}, "reference": frozen, "reward_model": frozen,
            "actor": trained(precision, stages[0]), "critic": trained(precision, stages[1]),
        }
    )  # fmt: skip
    directory = folder / f"ppo, {name}"
    directory.mkdir(exist_ok=True)
    inputs = {key: inputs[key] for key in ("prompts", "sft_model", "reward_model")}
    ppo.main(
        LaunchedJob(
            "ppo", "f", 1, {"ppo": config.model_dump(mode="json")}, inputs, {}, directory, 60.0
        )
    )


def run_sft(name: str, precision: str, stage: int, inputs: dict[str, Path], folder: Path) -> None:
    """Run five steps of SFT on eight rows each."""
    config = SFTConfig.model_validate(
        trained(precision, stage)
        | {"epochs": 5, "batch_size": 8, "micro_batch_tokens": 32, "evaluations": 1}
    )
    directory = folder / f"sft, {name}"
    directory.mkdir(exist_ok=True)
    inputs = {"demonstrations": inputs["demonstrations"], "base_model": inputs["sft_model"]}
    sft.main(
        LaunchedJob(
            "sft", "f", 1, {"sft": config.model_dump(mode="json")}, inputs, {}, directory, 60.0
        )
    )


def fp16(inputs: dict[str, Path], folder: Path, rank: int) -> None:
    """Run PPO with gradients that overflow on one rank; record which models moved in each step."""
    from deepspeed.accelerator import get_accelerator

    if not torch.cuda.is_available():
        get_accelerator().is_fp16_supported = lambda: True  # slow on a CPU, but correct
    update_models, step, log = ppo.update_models, 0, []

    def overflowing(loss, model):
        @functools.wraps(loss)
        def changed(*arguments, **options):
            total, count = loss(*arguments, **options)
            overflows = OVERFLOWS.get(step) == model and rank == 0
            return total * 1e30 if overflows else total, count

        return changed

    def recorded(models, *arguments, **options):
        nonlocal step
        step += 1
        if step == 1:
            models.actor.optimizer.loss_scaler.cur_scale = (
                models.critic.optimizer.loss_scaler.cur_scale
            ) = SCALE
        before = [whole_state_dict(engine.module) for engine in (models.actor, models.critic)]
        before = [{key: value.clone() for key, value in weights.items()} for weights in before]
        metrics = update_models(models, *arguments, **options)
        after = [whole_state_dict(engine.module) for engine in (models.actor, models.critic)]
        moved = [
            any(not torch.equal(was[key], new[key]) for key in was)
            for was, new in zip(before, after, strict=True)
        ]
        types = sorted({str(value.dtype) for weights in after for value in weights.values()})
        log.append(
            {
                "moved": moved,
                "types": types,
                "lr": [models.actor.get_lr()[0], models.critic.get_lr()[0]],
            }
        )
        return metrics

    ppo.update_models = recorded
    losses.policy_loss = overflowing(losses.policy_loss, "actor")
    ppo_update.value_loss = overflowing(ppo_update.value_loss, "critic")
    run_ppo("fp16", "fp16", (2, 3), FP16_STEPS, inputs, folder)
    if rank == 0:
        (folder / "fp16.json").write_text(json.dumps(log))


def answer_alike() -> None:
    """Let the random draws alone decide the tokens: rounding would change some of them."""

    def drawn(logits, draws, temperature, vocab_size):
        tokens = (draws * vocab_size).long()
        logprobs = (logits[:, :vocab_size].float() / temperature).log_softmax(-1)
        return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)

    transformers_generator.sampled = drawn


def main(inputs: dict[str, Path], folder: Path) -> None:
    """Run every setting, then fp16."""
    world = join(1, timeout_s=600)
    answer_alike()
    for name, (precision, *stages) in SETTINGS.items():
        run_sft(name, precision, stages[0], inputs, folder)
        run_ppo(name, precision, stages, STEPS, inputs, folder)
    fp16(inputs, folder, world.rank)


@pytest.fixture(scope="module")
def inputs(ppo_inputs, tmp_path_factory):
    """The inputs of PPO, and eight demonstrations."""
    rows = range(8)
    table = pa.table(
        {
            "id": [str(i) for i in rows],
            "prompt_ids": [[5 + i] * (1 + i % 3) for i in rows],
            "response_ids": [[20 + i, 30 + i, 1] for i in rows],
            "loss_mask": [[True] * 3 for _ in rows],
        }
    )
    contract = TokenContract.read(ppo_inputs["sft_model"])
    demonstrations = write_table(table, tmp_path_factory.mktemp("demonstrations"), contract)
    return ppo_inputs | {"demonstrations": demonstrations}


no_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: NCCL and fp16 kernels are not run"
)


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])]
)
def results(on_ranks, inputs, request):
    ranks = 2 if request.param == "cpu" else min(2, torch.cuda.device_count())
    return on_ranks(__file__, inputs, ranks=ranks, accelerator=request.param)


def metrics(results: Path, name: str) -> list[dict[str, float]]:
    return [
        json.loads(line)["metrics"]
        for line in (results / name / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "fp32"])
def test_sft_in_bf16_stays_close_to_fp32(results, name):
    """bf16 rounds each operation by up to 2^-9 = 0.2 % (8 bits of mantissa). The bound is 2 %."""
    expected, found = metrics(results, "sft, fp32"), metrics(results, f"sft, {name}")
    assert len(found) == len(expected) == 5
    for whole, half in zip(expected, found, strict=True):
        assert half["sft/loss"] == pytest.approx(whole["sft/loss"], rel=0.02)
    assert expected[-1]["sft/loss"] < expected[0]["sft/loss"] - 0.5  # training changes the loss


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "fp32"])
def test_ppo_in_bf16_stays_close_to_fp32(results, name):
    """The bound is 2 % of the entropy in each step, and of the value loss at the first step.

    Later, the value loss depends on what the critic has learned from steps of another precision.
    """
    expected, found = metrics(results, "ppo, fp32"), metrics(results, f"ppo, {name}")
    assert len(found) == len(expected) == STEPS
    assert all(math.isfinite(value) for line in found for value in line.values())
    for whole, half in zip(expected, found, strict=True):
        assert half["policy/entropy"] == pytest.approx(whole["policy/entropy"], rel=0.02)
        assert half["policy/ratio"] == pytest.approx(1.0, abs=0.02)
    assert found[0]["value/loss"] == pytest.approx(expected[0]["value/loss"], rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "fp32"])
@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_the_export_is_in_bf16(results, stage, name):
    import safetensors.torch

    export = results / f"{stage}, {name}" / "export"
    stored = safetensors.torch.load_file(export / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    loaded = load_policy(export, "fp32").state_dict()
    assert all(torch.equal(loaded[key], value.float()) for key, value in stored.items())


@pytest.mark.long
def test_in_fp16_actor_and_critic_skip_the_same_steps(results):
    """If the gradients of one overflow, both skip the step; only the scale of that one falls."""
    log, lines = json.loads((results / "fp16.json").read_text()), metrics(results, "ppo, fp16")
    assert len(log) == len(lines) == FP16_STEPS
    assert all(entry["types"] == ["torch.float16"] for entry in log)
    for step, (entry, line) in enumerate(zip(log, lines, strict=True), start=1):
        assert entry["moved"] == [step not in OVERFLOWS] * 2
        assert entry["lr"][0] == entry["lr"][1]
        skipped = sum(overflow <= step for overflow in OVERFLOWS)
        assert line["optim/actor_skipped_steps"] == line["optim/critic_skipped_steps"] == skipped
        assert (
            ("optim/actor_grad_norm" in line)
            == ("optim/critic_grad_norm" in line)
            == (step not in OVERFLOWS)
        )
    # Hysteresis 2: the first overflow has no effect, the second halves the scale of that model.
    scales = [(line["optim/actor_loss_scale"], line["optim/critic_loss_scale"]) for line in lines]
    assert scales == [(256, 256)] * 3 + [(128, 256)] * 3 + [(128, 128)] * 2
    assert "optim/actor_loss_scale" not in metrics(results, "ppo, fp32")[0]


if __name__ == "__main__":
    main({key: Path(value) for key, value in json.loads(sys.argv[1]).items()}, Path(sys.argv[2]))
