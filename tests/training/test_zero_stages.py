"""PPO at every ZeRO stage, for up to ten steps.

Two real ranks run this file as a program under DeepSpeed's launcher, all settings in one launch.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

STAGES = {
    "0": {"actor": {"zero_stage": 0}, "critic": {"zero_stage": 0}},
    "0, short": {"actor": {"zero_stage": 0}, "critic": {"zero_stage": 0}},
    "1": {"actor": {"zero_stage": 1}, "critic": {"zero_stage": 1}},
    "2": {"actor": {"zero_stage": 2}, "critic": {"zero_stage": 2}},
    "3": {"actor": {"zero_stage": 3}, "critic": {"zero_stage": 3}},
    "mixed": {
        "actor": {"zero_stage": 3},
        "critic": {"zero_stage": 2},
        "reward_model": {"zero_stage": 0},
    },
    "offloaded": {
        "actor": {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True},
        "critic": {"zero_stage": 2, "offload_optimizer": True},
        "reference": {"zero_stage": 3, "offload_parameters": True},
        "reward_model": {"zero_stage": 3, "offload_parameters": True},
    },
    "layer by layer": {"actor": {"zero_stage": 3}, "critic": {"zero_stage": 0}},
}
SHORT = ("0, short", "offloaded", "layer by layer")
STEPS = {name: 3 if name in SHORT else 10 for name in STAGES}
WHOLE = {name: "0, short" if name in SHORT else "0" for name in STAGES if not name.startswith("0")}
"""The unsharded run to compare each setting with."""
SHARDED = {  # the models that are sharded, by the rule if their stage is not given
    "0": [], "0, short": [], "1": [], "2": [],
    "3": ["actor", "reference", "critic", "reward_model"],
    "mixed": ["actor", "reference"],
    "offloaded": ["actor", "reference", "reward_model"],
    "layer by layer": ["actor", "reference"],
}  # fmt: skip


def main(inputs: dict[str, str], folder: Path) -> None:
    """Train with each setting; record which models were sharded."""
    from rlhf_pipeline.config.ppo import PPOConfig
    from rlhf_pipeline.distributed.world import join
    from rlhf_pipeline.distributed.zero import is_sharded
    from rlhf_pipeline.runtime.job import LaunchedJob
    from rlhf_pipeline.training import ppo, ppo_setup

    world = join(1, timeout_s=600)
    loaded = {}
    load = ppo_setup.load_ppo_models

    def remember(*args):
        models = load(*args)
        loaded[name] = [model for model, engine in models.engines().items() if is_sharded(engine)]
        return models

    ppo_setup.load_ppo_models = remember
    for name, blocks in STAGES.items():
        directory = folder / name
        directory.mkdir(exist_ok=True)
        # With the usual eps of 1e-8, Adam would amplify the rounding noise of tiny gradients.
        model = {"optimizer": {"learning_rate": 1e-3, "warmup_fraction": 0.0, "eps": 1e-4}}
        frozen = {
            key: {"deepspeed": blocks[key]}
            for key in ("reference", "reward_model")
            if key in blocks
        }
        config = PPOConfig.model_validate(
            {
                "steps": STEPS[name], "rollout_batch_size": 8, "minibatch_size": 4,
                "micro_batch_tokens": 64, "evaluations": 1,
                "sampling": {"max_response_tokens": 6},
                "gather_for_generation": name != "layer by layer",
                "actor": model | {"deepspeed": blocks["actor"]},
                "critic": model | {"deepspeed": blocks["critic"]},
            } | frozen
        )  # fmt: skip
        paths = {key: Path(value) for key, value in inputs.items()}
        job = LaunchedJob(
            "ppo", "f", 1, {"ppo": config.model_dump(mode="json")}, paths, {}, directory, 60.0
        )
        ppo.main(job)
    if world.rank == 0:
        (folder / "sharded.json").write_text(json.dumps(loaded))


@pytest.fixture(scope="module")
def results(on_ranks, ppo_inputs):
    return on_ranks(__file__, ppo_inputs)


def metrics(results: Path, name: str) -> list[dict[str, float]]:
    return [
        json.loads(line)["metrics"]
        for line in (results / name / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", WHOLE)
def test_losses_equal_those_of_stage_0(results, name):
    expected, found = metrics(results, WHOLE[name]), metrics(results, name)
    assert len(expected) == len(found) == STEPS[name]
    for step, (whole, sharded) in enumerate(zip(expected, found, strict=True), start=1):
        for key, value in whole.items():
            if not key.startswith("time/") and "grad_norm" not in key:
                assert sharded[key] == pytest.approx(value, rel=1e-4, abs=1e-6), (
                    f"{key} at step {step}"
                )


@pytest.mark.long
@pytest.mark.parametrize("name", WHOLE)
def test_the_export_is_whole_and_equals_that_of_stage_0(results, name):
    from rlhf_pipeline.models.loading import load_policy

    expected, found = (
        load_policy(results / key / "export", "fp32").state_dict() for key in (WHOLE[name], name)
    )
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", STAGES)
def test_models_are_sharded_according_to_their_stages(results, name):
    """Loading a sharded model does not shard the next one. A rule gives frozen models a stage."""
    assert json.loads((results / "sharded.json").read_text())[name] == SHARDED[name]


@pytest.mark.long
def test_the_settings_of_every_engine_are_stored(results):
    settings = json.loads((results / "offloaded" / "deepspeed.json").read_text())
    stages = {name: engine["zero_optimization"]["stage"] for name, engine in settings.items()}
    assert stages == {"actor": 3, "reference": 3, "critic": 2, "reward_model": 3}
    assert settings["actor"]["gradient_clipping"] == 1.0
    assert settings["critic"]["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
