"""Which stages train, and on which rows, if some blocks are null."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_pipeline.config import stages
from rlhf_pipeline.config.rewards import ModelReward, as_judges
from rlhf_pipeline.config.split import PHASES
from rlhf_pipeline.config.stages import adapter_rates, in_bf16, slow_precisions, trained_models
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.kedro_run.checks import check, check_values
from rlhf_pipeline.kedro_run.config_loader import LayeredConfigLoader
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS
from rlhf_pipeline.sizing.fit import changed

CONF = Path(__file__).parents[2] / "conf"
SHORT = {"max_response_tokens": 48}
BY_ANSWERS = {"rewards": [{"reference": "last_number"}], "sampling": SHORT}


@pytest.fixture
def parameters():
    return LayeredConfigLoader(str(CONF), env="base", **CONFIG_LOADER_ARGS)["parameters"]


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({}, (2, 4, 4)),
        ({"sft": None, "ppo": None}, (0, 4, 0)),  # all pairs serve the reward model and DPO
        ({"ppo": None, "grpo": {}}, (2, 4, 4)),
        ({"sft": None, "distill": {"teacher": "t", "given_batch_size": 2}}, (2, 4, 4)),
        ({"sft": None, "reward_model": None, "ppo": None}, (0, 4, 0)),  # DPO alone
        ({"sft": None, "reward_model": None, "ppo": None, "grpo": BY_ANSWERS}, (0, 0, 4)),
    ],
)
def test_a_phase_that_no_stage_uses_gets_no_rows(parameters, changes, weights):
    assert check_values(parameters | changes)["split"].weights == weights


def test_weights_of_phases_that_are_not_in_use_alone_are_refused(parameters):
    parameters["split"]["weights"] = [1, 0, 0]
    with pytest.raises(ConfigError, match=r"split\.weights: found \[1\.0, .* reward_model, ppo\."):
        check_values(parameters | {"sft": None})


PPO, GRPO, DPO = {"ppo", "evaluate"}, {"grpo", "evaluate_grpo"}, {"dpo", "evaluate_dpo"}
NO_MODEL = "found trained, but reward_model is null. Fix: set reward_model, or other rewards"
NO_JUDGE = "evaluate.judges: found none, expected at least one"


@pytest.mark.parametrize(
    ("changes", "nodes", "message"),
    [
        ({}, PPO, f"ppo.rewards: {NO_MODEL}"),
        ({"rejection": {}}, {"rejection"}, f"rejection.sample.rewards: {NO_MODEL}"),
        ({"ppo.rewards": ["json:dumps"]}, PPO, None),  # its critic starts from the policy
        ({}, DPO, NO_JUDGE),
        ({"grpo": {"rewards": [{"reference": "exact", "weight": -1}]}}, GRPO, NO_JUDGE),
        # Policies and evaluations that do not run need nothing.
        ({"grpo": BY_ANSWERS}, GRPO, None),
        ({"distill": {"teacher": "t"}}, {"distill", "evaluate_distill"}, NO_JUDGE),
        ({"grpo": BY_ANSWERS}, {"evaluate_grpo"}, None),
    ],
)  # fmt: skip
def test_what_needs_the_reward_model_or_a_judge_is_refused_without_one(
    parameters, changes, nodes, message
):
    blocks = check_values(changed(parameters, {"reward_model": None}, changes))
    faults = [*stages.faults_without_reward_model(blocks, nodes, has_gold=False)]
    assert faults == [] if message is None else faults[0].startswith(message)


def test_judges_made_from_rewards_are_checked_before_training(parameters, tmp_path, monkeypatch):
    """The gold score is a judge already."""
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text("def gold(prompts, responses): ...\n")
    rewards = [{"callable": "my.py:gold", "name": "gold"}]
    given = {"sft": None, "reward_model": None, "ppo": None, "grpo": {"rewards": rewards}}
    with pytest.raises(ConfigError, match="gold"):
        check(parameters | given, gpus=0, elsewhere=True)
    check(parameters | given | {"grpo": BY_ANSWERS}, gpus=0, elsewhere=True)


def test_a_reward_model_that_judges_renders_the_date_of_the_reward():
    fields = {"path": "/models/other", "retokenize": True, "template_date": "2020-02-02"}
    (judge,) = as_judges([ModelReward.model_validate(fields)])
    assert str(judge.template_date) == "2020-02-02"


PAIRS, SHOWN, ASKED = ["sft", "reward_model", "ppo"], ["sft"], ["ppo"]
DPO_ALONE = {"base_model", "split", "sft", "reward_model", "dpo"}


@pytest.mark.parametrize(
    ("nodes", "sizes", "kinds", "expected"),
    [
        ({"split", "sft"}, (20, 40, 40), [PAIRS],
         "trains on 20% of the training conversations; the others are for stages of "
         "reward_model and ppo that are not in it. To train on all of them, set split.weights to "
         "[2, 0, 0]"),
        # Without a weight, prompts would serve nothing, so there is no such advice.
        ({"split", "sft"}, (20, 0, 80), [SHOWN, ASKED],
         "trains on 20% of the training conversations; the others are for stages of ppo "
         "that are not in it"),
        # Answers with a true one: with `sft: null`, they have no other phase than PPO's.
        (DPO_ALONE, (0, 40, 40), [PAIRS, ["sft", "ppo"]],
         "trains on 50% of the training conversations; the others are for stages of ppo "
         "that are not in it"),
        ({*DPO_ALONE, "ppo"}, (20, 40, 40), [PAIRS], None),
        ({"distill"}, (20, 0, 40), [SHOWN], None),
    ],
)  # fmt: skip
def test_a_run_says_how_much_of_its_split_it_leaves_to_others(nodes, sizes, kinds, expected):
    report = {
        "conversations": dict(zip(PHASES, sizes, strict=True)) | {"test": 5},
        "serves": kinds,
        "settings": {"weights": [2.0 if sizes[0] else 0.0, 4.0, 4.0]},
    }
    blocks = {"distill": SimpleNamespace(given_batch_size=4)}
    assert stages.unused_rows(report, nodes, blocks) == (expected and f"split: this run {expected}")


def test_the_shares_of_the_phases_are_those_of_rows_that_can_serve_each(parameters):
    text = "Training conversations that can serve each phase: sft 20%, reward_model 40%, ppo 40%"
    assert stages.shares_text(check_values(parameters)["split"]) == text


def test_a_policy_that_samples_needs_its_rewards_and_positions(parameters):
    parameters |= {"reward_model": None, "ppo": None}
    for sample, message in (
        ({}, "rejection.sample.sampling.max_response_tokens: found 256"),
        ({"rewards": [{"path": "rm", "mean": 1.0}]}, "sample.rewards.0.mean: found 1.0, expected"),
        ({"validation_prompts": 1}, "validation_prompts: found 1, expected at least the 2"),
        ({"rewards": ["nowhere.py:f"], "sampling": SHORT}, "rejection.sample.rewards.0: nowhere"),
    ):
        with pytest.raises(ConfigError) as refusal:
            check(parameters | {"rejection": {"sample": sample}}, gpus=0, elsewhere=True)
        assert message in str(refusal.value)


def test_a_learning_rate_that_the_user_set_is_that_of_the_adapters(parameters):
    parameters["sft"]["lora"] = {}
    parameters["dpo"]["lora"] = {}
    blocks = check_values(parameters)
    rate = "sft.optimizer.learning_rate"
    assert list(adapter_rates(blocks, ["sft", "evaluate"], [rate])) == []
    (line,) = adapter_rates(blocks, ["sft", "evaluate"], ["dpo.optimizer.learning_rate"])
    assert line.endswith(f"Fix: set {rate} to 0.03")  # that of the embedded model is 3e-3


def test_a_gpu_trains_in_bf16_where_nobody_set_a_precision(parameters):
    parameters["sft"]["deepspeed"] = {"precision": "fp32"}
    parameters["dpo"]["deepspeed"] = {"zero_stage": 0}  # has no bf16
    parameters["ppo"]["actor"]["deepspeed"] = {"zero_stage": 3}
    by_default = {"grpo": BY_ANSWERS, "rejection": {"sample": BY_ANSWERS}}
    blocks = check_values(in_bf16(parameters | by_default))
    policies = trained_models(blocks, ["grpo", "rejection"])
    assert {each.config.deepspeed.precision for each in policies} == {"bf16"}
    assert in_bf16(parameters)["iterative_dpo"] is None
    assert blocks["ppo"].actor.deepspeed.zero_stage == 3
    nodes = ["sft", "reward_model", "ppo", "dpo", "evaluate"]
    found = {each.block: each.config.deepspeed.precision for each in trained_models(blocks, nodes)}
    assert found == {"sft": "fp32", "reward_model": "bf16", "ppo.actor": "bf16",
                     "ppo.critic": "bf16", "dpo": "fp32"}  # fmt: skip
    (line,) = slow_precisions(blocks, nodes)
    assert line.startswith("deepspeed.precision of sft, dpo: found fp32, expected bf16, which")
    assert not [*slow_precisions(blocks, ["ppo", "evaluate"])]
