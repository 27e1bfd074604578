"""`kedro rlhf params`: the parameters with defaults, types and meanings."""

import pytest
import yaml
from click.testing import CliRunner

from rlhf_pipeline.cli import cli
from rlhf_pipeline.commands.params import top_level
from rlhf_pipeline.pipelines.table import parameter_blocks


def shown(*arguments, code=0):
    done = CliRunner().invoke(cli, ["rlhf", "params", *arguments])
    assert done.exit_code == code, done.output
    return done.output


def lines(*arguments):
    """What is printed, line by line, without the spaces around."""
    return [line.strip() for line in shown(*arguments).splitlines()]


def test_without_a_name_the_blocks_are_listed():
    listed = [line.split()[0] for line in lines()[1:]]
    assert listed == list(parameter_blocks())
    assert any(line.split(None, 1) == ["sft", "Supervised fine-tuning"] for line in lines())


def test_a_block_is_shown_with_defaults_types_and_meanings():
    found = lines("ppo.sampling")
    assert found[0].startswith("ppo.sampling  How responses are sampled")
    place = found.index("temperature: 1.0  number > 0")
    assert found[place + 1] == "Softmax temperature in sampling and in every log-probability."


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("grpo.actor.optimizer", "learning_rate: 1.0e-6  number > 0"),  # the class of the policy
        ("grpo", "actor: {optimizer: {learning_rate: 1.0e-6}}  block"),
        ("ppo.actor.optimizer", "learning_rate: 3.0e-6  number > 0"),  # conf/base
        ("split.pretraining", "block_tokens:  integer ≥ 2"),  # no default
        ("launch", "grace_s: 120.0  number ≥ 0; not in the recipe"),
        ("ppo.kl", "place: reward  `reward`, `loss`"),
    ],
)
def test_the_default_is_the_one_in_effect(place, line):
    assert line in lines(place)


def test_what_a_block_refuses_is_not_shown():
    for field in ("critic", "value_lam"):
        assert f"\n  {field}:" in shown("ppo")
        assert f"\n  {field}:" not in shown("grpo") + shown("distill")


def test_what_is_shown_is_yaml_with_a_meaning():
    for top in top_level():
        for each in top.inside(top.blocks[0]):
            assert list(yaml.safe_load(str(each))) == [each.place.rpartition(".")[2]]
            assert each.meaning


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("grop", "grop: found 'grop', expected a block (did you mean grpo?)"),
        ("ppo.smapling", "found 'smapling', expected a parameter (did you mean sampling?)"),
        ("ppo.kl.x", "ppo.kl.x: found 'x', expected a parameter: coef, place, target, horizon,"),
        ("ppo.steps.x", "ppo.steps.x: found 'x', expected a parameter: none"),
        ("distill.rewards", "distill.rewards: found 'rewards', expected a parameter: "),
    ],
)
def test_an_unknown_name_is_refused(place, message):
    assert message in shown(place, code=1)
