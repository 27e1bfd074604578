"""The settings of DeepSpeed that a job will have, and whether DeepSpeed accepts them."""

import copy
import json
import subprocess
import sys

import pytest

from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.distributed.dry_run import engine_settings, refusal
from rlhf_pipeline.runtime.job import LaunchedJob

OPTIMIZER = {"optimizer": {"learning_rate": 1e-5}}
SUPERVISED = OPTIMIZER | {"epochs": 1, "batch_size": 8, "micro_batch_tokens": 64}
PPO = {
    "steps": 1, "rollout_batch_size": 8, "minibatch_size": 8, "micro_batch_tokens": 64,
    "actor": OPTIMIZER, "critic": OPTIMIZER,
}  # fmt: skip
SHARDED = {"deepspeed": {"zero_stage": 3, "precision": "bf16"}}
LORA = {"lora": {"rank": 8}}


def stages(stage, block, companion=SUPERVISED, tmp_path=None):
    """The ZeRO stage of each engine of a job."""
    name = "evaluate" if stage.startswith("evaluate") else stage
    job = LaunchedJob(stage, "f", 1, {name: block}, {}, {}, tmp_path, 1.0)
    sft = SFTConfig.model_validate(companion)
    found = engine_settings(job, sft, hidden_size=64, on_gpu=True)
    return {name: settings["zero_optimization"]["stage"] for name, settings in found.items()}


@pytest.mark.parametrize(
    ("stage", "block", "expected"),
    [
        ("base_model", {}, {}),
        ("sft", SUPERVISED, {"sft": 1}),
        ("reward_model", SUPERVISED | SHARDED, {"reward_model": 3}),
        ("dpo", SUPERVISED, {"dpo": 1}),
        ("dpo", SUPERVISED | SHARDED, {"dpo": 3, "reference": 3}),
        # With adapters the policy is its own reference.
        ("dpo", SUPERVISED | SHARDED | LORA, {"dpo": 3}),
        ("ppo", PPO, {"actor": 1, "critic": 1}),
        (
            "ppo",
            PPO | {"actor": OPTIMIZER | SHARDED},
            {"actor": 3, "critic": 1, "reference": 3},
        ),
        ("ppo", PPO | {"actor": OPTIMIZER | SHARDED | LORA}, {"actor": 3, "critic": 1}),
        (
            "ppo",
            PPO | {"critic": OPTIMIZER | SHARDED, "actor": OPTIMIZER | LORA},
            {"actor": 1, "critic": 3, "reward_model": 3},
        ),
        (
            "ppo",
            PPO | {"critic": None, "advantage": "reinforce", "actor": OPTIMIZER | SHARDED},
            {"actor": 3, "reference": 3, "reward_model": 3},
        ),
        ("evaluate", {}, {}),
        ("evaluate_dpo", {"zero_stage": 3}, {"evaluate": 3}),
    ],
)
def test_engines(stage, block, expected):
    assert stages(stage, block) == expected


def test_an_evaluation_shards_as_training_did():
    assert stages("evaluate", {}, SUPERVISED | SHARDED) == {"evaluate": 3}
    assert stages("evaluate", {"zero_stage": 0}, SUPERVISED | SHARDED) == {}


def test_the_settings_are_those_of_a_real_run(project):
    directories = {name: project.recipes(name)[0] for name in ("sft", "reward_model", "ppo")}
    jobs = {name: LaunchedJob.read(path / "job.json") for name, path in directories.items()}
    sft = jobs["sft"].block("sft", SFTConfig)
    for job in jobs.values():
        stored = json.loads(job.deepspeed_file.read_text())
        config = json.loads((job.inputs["sft_model" if "sft_model" in job.inputs else "base_model"]
                             / "config.json").read_text())  # fmt: skip
        found = engine_settings(job, sft, hidden_size=config["hidden_size"], on_gpu=False)
        assert json.loads(json.dumps(found)) == stored


@pytest.fixture
def settings():
    job = LaunchedJob("sft", "f", 1, {"sft": SUPERVISED | SHARDED}, {}, {}, None, 1.0)
    config = job.block("sft", SFTConfig)
    return engine_settings(job, config, hidden_size=64, on_gpu=True)["sft"]


def test_deepspeed_accepts_the_settings_on_any_number_of_ranks(settings):
    before = copy.deepcopy(settings)
    assert [refusal(settings, ranks) for ranks in (1, 8, 64)] == [None, None, None]
    assert settings == before


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("zero_optimization", {"stage": 4}, "stage: Input should be 0, 1, 2, 3"),
        ("zero_optimization", {"bogus": 1}, "bogus: Extra inputs are not permitted"),
        ("fp16", {"enabled": True}, "bfloat16 and fp16 modes cannot be simultaneously enabled"),
        (
            "zero_optimization",
            {"offload_optimizer": {"device": "gpu"}},
            "offload_optimizer.device: Input should be 'none', 'cpu' or 'nvme'",
        ),
    ],
)
def test_deepspeed_refuses_other_settings(settings, place, value, reason):
    settings[place] |= value
    assert refusal(settings, 8).startswith(reason)


def test_a_batch_that_the_ranks_cannot_share_is_refused(settings):
    assert refusal(settings | {"train_batch_size": 5}, 8).startswith("Check batch related")


def test_the_program_answers_for_all_jobs(tmp_path):
    job = {
        "stage": "sft", "fingerprint": "f", "seed": 1, "config": {"sft": SUPERVISED},
        "inputs": {}, "digests": {}, "collective_timeout_s": 1.0,
    }  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    machine = {"hidden_size": 64, "on_gpu": True}
    request = {"jobs": [str(tmp_path / "job.json")], "ranks": 8, "machine": machine}
    (tmp_path / "request.json").write_text(json.dumps(request))
    subprocess.run(
        [
            *(sys.executable, "-m", "rlhf_pipeline.distributed.dry_run"),
            *(tmp_path / "request.json", tmp_path / "answer.json"),
        ],
        check=True,
    )
    assert json.loads((tmp_path / "answer.json").read_text()) == {"sft": {"sft": None}}
