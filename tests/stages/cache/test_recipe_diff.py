"""The differences between two recipes are reported by the names that a user knows."""

import pytest

from rlhf_pipeline.stages.cache.planning import EARLIER_FORM, recipe_changes

RECIPE = {
    "form": 2,
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
    ("recipe", "changes"),
    [
        (new(), []),
        (ppo(kl={"coef": 0.2}), ["ppo.kl.coef 0.1 -> 0.2"]),
        (new(trust_remote_code=True), ["base_model.trust_remote_code false -> true"]),
        (ppo(lora={"rank": 8}), ['ppo.lora null -> {"rank": 8}']),
        (ppo(rewards=[{"weight": 1.0}, {"weight": 3.0}]), ["ppo.rewards.1.weight 2.0 -> 3.0"]),
        (
            ppo(rewards=[{"weight": 1.0}, {"weight": 2.0}, {"weight": 1.0, "callable": "my.py:f"}]),
            [
                "ppo.rewards [weight 1.0, weight 2.0] -> "
                "[weight 1.0, weight 2.0, weight 1.0 callable my.py:f]"
            ],
        ),
        (ppo(rewards=[]), ["ppo.rewards [weight 1.0, weight 2.0] -> []"]),
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
def test_each_change_is_reported_by_name(recipe, changes):
    assert recipe_changes(RECIPE, recipe, pending=()) == changes


def test_a_pending_input_is_not_a_change():
    recipe = new(inputs={"sft_model": "sft", "prompts": "xx"}, seed=2)
    assert recipe_changes(RECIPE, recipe, pending=["sft_model"]) == [
        "seed 1 -> 2",
        "input prompts changed",
    ]


@pytest.mark.parametrize("form", [{}, {"form": 1}], ids=["none", "earlier"])
def test_recipes_of_different_forms_are_not_compared(form):
    other = {name: value for name, value in RECIPE.items() if name != "form"} | form
    other["config"] = {"ppo": {"renamed": 8}}
    assert recipe_changes(other, new(seed=7), pending=()) == [EARLIER_FORM]


def test_a_recipe_of_an_earlier_form_may_lack_every_field():
    assert recipe_changes({}, RECIPE, pending=()) == [EARLIER_FORM]


def test_reward_sources_are_told_apart_by_what_they_do_not_share():
    trained = {"weight": 1.0, "name": None, "model": "trained"}
    mine = {"weight": 1.0, "name": None, "callable": "my_rewards.py:correct"}
    old = new(config={"ppo": {"rewards": [trained]}})
    changed = new(config={"ppo": {"rewards": [mine, trained]}})
    assert recipe_changes(old, changed, pending=()) == [
        "ppo.rewards [model trained] -> [callable my_rewards.py:correct, model trained]"
    ]


@pytest.mark.parametrize(("old", "shown"), [([], "[]"), (None, "null"), ("a", "a")])
def test_the_first_block_of_a_list_is_shown(old, shown):
    judge = {"weight": 1.0, "name": None, "callable": "my_judges.py:brief"}
    changed = new(config={"evaluate": {"judges": [judge]}})
    found = recipe_changes(new(config={"evaluate": {"judges": old}}), changed, pending=())
    assert found == [f"evaluate.judges {shown} -> [weight 1.0 callable my_judges.py:brief]"]
