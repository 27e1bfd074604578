"""What is told of two recipes is what differs, by the names that a user knows."""

import pytest

from rlhf_pipeline.stages.cache.recipe_diff import differences

RECIPE = {
    "stage": "ppo",
    "seed": 1,
    "config": {
        "ppo": {
            "steps": 8,
            "kl": {"coef": 0.1},
            "lora": None,
            "rewards": [{"weight": 1.0}, {"weight": 2.0}],
        }
    },
    "inputs": {"sft_model": "aa", "prompts": "bb"},
    "code": {"training/ppo.py": "c0", "training/ppo_update.py": "c1", "rl/kl.py": "c2"},
    "versions": {"torch": "2.13.0", "numpy": "2.4.0"},
    "processes": 2,
}


def new(**changes):
    return RECIPE | changes


def ppo(**changes):
    return new(config={"ppo": RECIPE["config"]["ppo"] | changes})


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        (new(), []),
        (ppo(kl={"coef": 0.2}), ["ppo.kl.coef 0.1 -> 0.2"]),
        (new(trust_remote_code=True), ["base_model.trust_remote_code false -> true"]),
        (ppo(lora={"rank": 8}), ['ppo.lora null -> {"rank": 8}']),
        (ppo(rewards=[{"weight": 1.0}, {"weight": 3.0}]), ["ppo.rewards.1.weight 2.0 -> 3.0"]),
        (ppo(rewards=[]), ['ppo.rewards [{"weight": 1.0}, {"weight": 2.0}] -> []']),
        (ppo(steps=list(range(30))), ["ppo.steps 8 -> [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11..."]),
        (new(seed=7), ["seed 1 -> 7"]),
        (new(processes=4), ["processes 2 -> 4"]),
        (new(versions={"torch": "2.14", "numpy": "2.4.0"}), ["torch 2.13.0 -> 2.14"]),
        (new(inputs={"sft_model": "xx", "prompts": "bb"}), ["input sft_model changed"]),
        (
            new(inputs={"sft_model": "aa", "rewards.1": "cc"}),
            ["input prompts is gone", "input rewards.1 is new"],
        ),
        (
            new(code={"training/ppo.py": "c0", "training/ppo_update.py": "xx", "rl/new.py": "c3"}),
            ["code changed: rl/kl.py, rl/new.py, training/ppo_update.py"],
        ),
    ],
)
def test_each_ingredient_is_told_by_name(recipe, told):
    assert differences(RECIPE, recipe, unmade=()) == told


def test_an_input_that_is_not_made_yet_is_no_difference():
    recipe = new(inputs={"sft_model": "sft", "prompts": "xx"}, seed=2)
    assert differences(RECIPE, recipe, unmade=["sft_model"]) == [
        "seed 1 -> 2",
        "input prompts changed",
    ]
