"""Code of another package, that of docs/extending.md, in every place where parameters can name it.

test_package.py has such a package beside the wheel of this one.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from extending_page import DOORS, write_metadata, write_pairs, write_project

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(scope="module")
def extended(new_project, tmp_path_factory):
    """A project whose parameters name that code, its folder `src`, and a run."""
    folder = tmp_path_factory.mktemp("extended")
    src = write_project(folder / "my_rlhf")
    write_metadata(src)
    write_pairs(folder / "pairs.jsonl", 600)
    conf = folder / "conf"
    shutil.copytree(CONF, conf, ignore=shutil.ignore_patterns("local"))
    parameters = {"launch": {"processes": 1}}  # the code of a rank does not depend on their number
    for place, value in DOORS.items():
        block, _, field = place.partition(".")
        parameters.setdefault(block, {})[field] = value
    parameters["split"]["sources"][0]["path"] = str(folder / "pairs.jsonl")
    (conf / "local").mkdir()
    (conf / "local" / "parameters.yml").write_text(yaml.safe_dump(parameters))
    project = new_project(folder / "data")
    paths = [str(src), *filter(None, [os.environ.get("PYTHONPATH")])]
    project.secrets = {"PYTHONPATH": os.pathsep.join(paths)}

    def kedro(*arguments, **options):
        return project.kedro(f"--conf-source={conf}", *arguments, **options)

    nodes = "--to-nodes=evaluate,dpo,report_simpo"
    kedro("--pipelines=full,dpo,simpo", nodes)
    return project, kedro, src


@pytest.mark.slow
def test_code_of_another_package_runs_at_every_door(extended):
    """Without a change of our package."""
    project, kedro, _ = extended

    def directory(stage):
        (found,) = (project.root / "07_workspace" / stage).glob("*/recipe.json")
        return found.parent

    steps = (directory("ppo") / "metrics.jsonl").read_text().splitlines()
    assert "reward/concise" in json.loads(steps[0])["metrics"]
    named = {
        "source": {"my_rlhf.sources"},
        "reward_model": {"my_rlhf.losses"},
        "dpo": {"my_rlhf.losses"},
        "ppo": {"my_rlhf.losses", "my_rlhf.advantages", "my_rlhf.generators"},
        "simpo": {"my_rlhf.simpo.program", "my_rlhf.simpo.config"},
        "evaluate": {"my_rlhf.generators"},
    }
    for stage, modules in named.items():
        recipe = json.loads((directory(stage) / "recipe.json").read_text())
        assert modules <= recipe["code"].keys(), stage
    for stage, policy in (("evaluate", "ppo"), ("evaluate_simpo", "simpo")):
        file = directory(stage) / "export" / "evaluation.json"
        evaluation = json.loads(file.read_text())
        assert evaluation["candidate"] == policy
        assert "concise" in evaluation["win_rates"]
    printed = kedro(command="rlhf prompts")
    assert re.search(r"^ppo/train.arrow \d+$", printed, re.M)


@pytest.mark.slow
def test_an_edit_of_that_code_reruns_the_stages_that_name_it(extended):
    _, kedro, src = extended

    def states():
        table = kedro("--pipeline=full", command="rlhf status")
        return {line.split()[0]: line.split()[1] for line in table.splitlines() if line.strip()}

    before = states()
    file = src / "my_rlhf" / "advantages.py"
    file.write_text(file.read_text() + "\nx = 1\n")
    after = states()
    assert before["ppo"] == before["reward_model"] == after["reward_model"] == "finished"
    assert after["ppo"] == "run"
