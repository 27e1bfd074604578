"""Code of another package: named, checked before a run, part of the recipe, and called."""

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from extending_page import DOORS, write_metadata, write_project
from ppo_runs import ppo_config

from rlhf_pipeline.cli import COMMAND, rlhf
from rlhf_pipeline.config import doors
from rlhf_pipeline.config.doors import ADVANTAGE, GENERATOR, POLICY_LOSS, call_with
from rlhf_pipeline.config.rewards import CallableReward
from rlhf_pipeline.config.split import BlendedSourceConfig
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.kedro_run.checks import check
from rlhf_pipeline.kedro_run.config_loader import LayeredConfigLoader
from rlhf_pipeline.kedro_run.dry_run import code_faults, scorer_faults
from rlhf_pipeline.pipelines import table
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS
from rlhf_pipeline.sizing.fit import changed
from rlhf_pipeline.stages.cache.fingerprint import code_digests
from rlhf_pipeline.training.ppo_update import terms_of

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The folder with the package of docs/extending.md, which this process can import."""
    src = write_project(tmp_path)
    write_metadata(src)
    monkeypatch.syspath_prepend(src)
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "a", "response_0": "b", "response_1": "c", "better_response_id": 1}
    Path("pairs.jsonl").write_text(json.dumps(row))
    doors._entry_points.cache_clear()
    yield src / "my_rlhf"
    doors._entry_points.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_rlhf"]:
        del sys.modules[name]


def parameters(**places):
    """Those of the project, with the code of the package, and with others by place."""
    loader = LayeredConfigLoader(str(CONF), env="base", **CONFIG_LOADER_ARGS)
    return changed(loader["parameters"], DOORS, places)


def test_all_code_of_the_page_has_names_and_what_programs_run_is_not_imported(installed):
    blocks = check(parameters(), gpus=0)
    assert blocks["ppo"].policy_loss == "gspo"
    assert blocks["evaluate"].judges[0].callable == "my_rlhf.rewards:concise"
    imported = {name for name in sys.modules if name.partition(".")[0] == "my_rlhf"}
    inside = {"sources", "simpo", "simpo.node", "simpo.config"}
    assert imported == {"my_rlhf", *(f"my_rlhf.{name}" for name in inside)}
    assert "simpo_model" in table.register_pipelines()["simpo"].all_outputs()
    assert COMMAND.names()["prompts"] == "my_rlhf.commands:prompts"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("ppo.policy_loss", "gsppo",
         "found policy_loss 'gsppo' (did you mean gspo?), expected clip, cispo, gspo, "),
        ("evaluate.generator", "hybrid", "found generator 'hybrid', expected transformers, vllm, "),
        ("split.sources", [{"name": "my_rlhf.wrong:Silent"}], "expected a Source"),
    ],
)  # fmt: skip
def test_a_name_that_does_not_fit_is_refused_before_a_run(installed, place, value, message):
    (installed / "wrong.py").write_text("class Silent: ...")
    with pytest.raises(ConfigError) as error:
        check(parameters(**{place: value}), gpus=0)
    assert error.value.message.startswith(place) and message in error.value.message


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("ppo.policy_loss", "my_losses:gspo", "my_losses:gspo: found no module my_losses. Fix: "),
        ("ppo.policy_loss", "my_rlhf.losses:gsp", "found functions apo_zero, gspo, hinge in "),
        ("ppo.policy_loss", "my_rlhf.losses:hinge",
         "my_rlhf.losses:hinge cannot be called: missing a required argument: 'chosen_scores'. "
         "Fix: name its parameters after what they get, which is logprobs, old_logprobs, "
         "advantages, mask, reduce and the parameters of ppo; give others a default"),
        ("ppo.policy_loss", "my_rlhf.wrong:later", "found `async def`, expected `def`"),
        ("ppo.generator", "my_rlhf.wrong:Silent", "found no method generate, expected one"),
        ("ppo.generator", "my_rlhf.wrong:Greedy", "missing a required argument: 'model'"),
    ],
)  # fmt: skip
def test_code_that_does_not_fit_is_refused_before_a_run(
    installed, monkeypatch, place, value, message
):
    monkeypatch.setenv("PYTHONPATH", str(installed.parent))
    (installed / "wrong.py").write_text(
        "class Silent: ...\nclass Greedy:\n    def __init__(self, model): ...\n"
        "    def generate(self, prompts, sampling, seeds, prompt_numbers=None): ...\n"
        "async def later(logprobs): ...\n"
    )
    (installed / "losses.py").write_text(
        "def gspo(): ...\ndef apo_zero(): ...\ndef hinge(chosen_scores, rejected_scores): ...\n"
    )
    block, _, field = place.partition(".")
    kind = type(check(parameters(**{place: value}), gpus=0)[block])
    given = {block: kind.model_construct(**{field: value})}
    (fault,) = code_faults(given, installed / "work")
    assert fault.startswith(place) and message in fault
    assert "Traceback" not in fault


def test_an_advantage_that_reads_values_needs_a_critic(installed):
    (installed / "advantages.py").write_text("def of_values(rewards, values, mask): ...\n")
    message = r"ppo.critic: found none, expected a block for adv.* my_rlhf"
    with pytest.raises(ConfigError, match=message):
        check(parameters(**{"ppo.advantage": "my_rlhf.advantages:of_values"}), gpus=0)


def test_a_column_is_asked_of_all_sources_that_a_function_reads(installed, monkeypatch):
    """One with a default is for all prompts or for none: the rows of a batch would decide."""
    monkeypatch.setenv("PYTHONPATH", str(installed.parent))
    (installed / "rewards.py").write_text(
        "def of(prompts, responses, level): ...\ndef may(prompts, responses, level=0): ...\n"
    )
    columns = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    plain, rated = (
        BlendedSourceConfig(name="files", path="rows.jsonl", columns=columns | more)
        for more in ({}, {"extra": ["level"]})
    )

    def faults(name, *sources):
        given = {"evaluate.judges.0": CallableReward(callable=f"my_rlhf.rewards:{name}")}
        return [*scorer_faults(given, [], dict(enumerate(sources)), {}, installed / "work")]

    assert faults("of", rated) == faults("may", plain) == faults("may", rated) == []
    for name in ("of", "may"):
        assert faults(name, rated, plain) == [
            f"evaluate.judges.0: my_rlhf.rewards:{name} asks for level, which split.sources.1 does "
            "not carry. Fix: add `extra: [level]` to the columns of split.sources.1"
        ]


def test_packages_that_share_the_name_of_a_command_stop_no_command_of_ours(installed):
    file = installed.parent / "my_rlhf-0.1.0.dist-info" / "entry_points.txt"
    file.write_text("[rlhf_pipeline.command]\nplan = my_rlhf.commands:prompts\n")
    ours = CliRunner().invoke(rlhf, ["plan", "--help"])
    assert ours.exit_code == 0 and "Usage:" in ours.output
    theirs = CliRunner().invoke(rlhf, ["prompts"])
    assert theirs.exit_code == 1
    assert "found plan at rlhf_pipeline.commands.plan:plan and my_rlhf.commands" in theirs.output


def test_a_module_that_is_no_algorithm_is_refused(installed):
    (installed / "simpo" / "node.py").write_text("SPEC = 1\n")
    with pytest.raises(ConfigError, match=r"entry point simpo of rlhf_pipeline.policy: found my_"):
        table.policy_stages()


def test_the_code_of_a_name_counts_with_what_it_imports_from_its_package(installed):
    (installed / "losses.py").write_text("from . import unit\nfrom .unit import x\nimport json\n")
    (installed / "unit.py").write_text("x = 1\n")
    before = code_digests("my_rlhf.losses")
    assert before.keys() == {"my_rlhf", "my_rlhf.losses", "my_rlhf.unit"}
    (installed / "unit.py").write_text("x = 2\n")
    after = code_digests("my_rlhf.losses")
    assert {name for name in before if before[name] != after[name]} == {"my_rlhf.unit"}
    ours = code_digests("my_rlhf.simpo.program")
    assert {"my_rlhf.simpo.config", "training/supervised.py"} <= ours.keys()


def test_a_loss_counts_its_own_terms(installed, world):
    """Three tokens in two sequences."""
    mask = torch.tensor([[True, True], [True, False]])
    for name, terms in (("clip", 3), ("gspo", 2)):
        assert float(terms_of([mask], ppo_config(policy_loss=name), world).policy) == terms
    zeros = torch.zeros(2, 2)
    tensors = {"logprobs": zeros, "old_logprobs": zeros, "advantages": zeros + 2, "mask": mask}
    loss, count = call_with(POLICY_LOSS.load("gspo"), ppo_config(), **tensors)
    assert (float(loss), float(count)) == (-4.0, 2.0)


def test_our_own_names_exist():
    for door in (ADVANTAGE, POLICY_LOSS, GENERATOR, doors.REWARD_LOSS, doors.DPO_LOSS):
        assert all(callable(door.load(name)) for name in door.builtin)
