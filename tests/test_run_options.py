"""Names, tags and commands of runs from the options of `kedro run`."""

import pytest
from click.testing import CliRunner
from kedro.pipeline import Pipeline, node

from rlhf_pipeline.cli import cli
from rlhf_pipeline.run.hooks import NAME_LENGTH, run_name, whole_run


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "full"),
        ({"pipeline_names": ["dpo"], "env": "local"}, "dpo"),
        (
            {
                "pipeline_names": ["full"],
                "env": "hh-rlhf",
                "runtime_params": {"seed": 5, "ppo": {"kl": {"coef": 0.2}}, "root": "/data"},
            },
            "full hh-rlhf seed=5 ppo.kl.coef=0.2",
        ),
        ({"from_nodes": ["ppo"], "env": "tiny"}, "full from ppo tiny"),
        ({"node_names": ["sft", "reward_model"]}, "sft+reward_model"),
        (
            {"runtime_params": {"base_model": {"path": "a" * 200}}},
            f"full base_model.path={'a' * 99}",
        ),
    ],
)
def test_the_name_says_what_the_run_is(options, name):
    assert run_name(options) == name
    assert len(name) <= NAME_LENGTH


@pytest.mark.parametrize(
    ("nodes", "options", "command"),
    [
        (["ppo", "evaluate"], {}, "kedro run --pipeline=full"),
        (["dpo", "evaluate_dpo"], {"env": "tiny"}, "kedro run --pipeline=dpo --env=tiny"),
        (["evaluate"], {"runtime_params": {"seed": 5}},
         "kedro run --pipeline=full --params=seed=5"),
        (["sft"], {"runtime_params": {"ppo": {"ptx": None}, "base_model": {"path": "my model"}}},
         "kedro run --pipeline=full --params='ppo.ptx=null,base_model.path=my model'"),
    ],
)  # fmt: skip
def test_the_command_for_all_stages_keeps_environment_and_parameters(nodes, options, command):
    pipeline = Pipeline([node(lambda: 1, None, name, name=name) for name in nodes])
    assert whole_run(options, pipeline) == command


def test_name_and_command_contain_no_secret():
    options = {"runtime_params": {"path": "https://me:canary@host/a?sig=canary"}}
    assert "canary" not in run_name(options) + whole_run(options, Pipeline([]))


def test_the_help_of_run_names_the_sign_that_params_need():
    """Kedro's own help allows a colon, too, which Kedro refuses."""
    shown = " ".join(CliRunner().invoke(cli, ["run", "--help"]).output.split())
    assert "colon" not in shown and "Example: seed=5,ppo.steps=100" in shown
