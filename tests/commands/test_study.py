"""`kedro rlhf study`: recipes times seeds as cached runs, one table, one page, one MLflow run."""

import json
import re
from types import SimpleNamespace

import pytest
from made_by_hand import artifact

from rlhf_pipeline.commands.study import amount_of
from rlhf_pipeline.commands.study_runs import Recipe, cost, recipes_of
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.runtime.manifest import Manifest


@pytest.mark.parametrize(
    ("named", "text", "message"),
    [
        ("", None, "--pipelines: found none, expected some such as full,dpo,grpo"),
        ("dpoo", None, r"dpoo: found pipeline 'dpoo' \(did you mean dpo\?\), expected full, grpo"),
        ("ppo", None, "ppo: found pipeline 'ppo'"),  # it has no evaluation
        ("", "[1]", "--recipes: found .* expected a mapping such as"),
        ("", "{a: {}}", r"a\.pipeline: missing"),
        ("", "{a: {pipeline: dpo, seeds: 3}}", r"a\.seeds: unknown parameter"),
        (
            "",
            "{a: {pipeline: dpo, params: {seed: 3}}}",
            r"a\.params: found seed, which the study sets",
        ),
    ],
)
def test_a_recipe_that_cannot_be_is_named(named, text, message, tmp_path):
    file = None if text is None else tmp_path / "recipes.yml"
    if file is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        recipes_of(named, file)


def test_recipes_of_a_file_have_names_and_parameters(tmp_path):
    (tmp_path / "recipes.yml").write_text("{careful: {pipeline: dpo, params: {dpo: {beta: 1.0}}}}")
    first, second = recipes_of("full", tmp_path / "recipes.yml")
    assert (first.name, first.policy, first.params) == ("full", "ppo", {})
    assert (second.name, second.policy, second.params) == ("careful", "dpo", {"dpo.beta": 1.0})


@pytest.mark.parametrize("budget", ["steps", "steps=0", "hours=3", "answers=-1"])
def test_a_budget_has_a_unit_and_an_amount(budget):
    with pytest.raises(ConfigError, match=f"--budget: found '{budget}', expected UNIT=N with one"):
        amount_of(budget)
    assert amount_of("answers=3072") == ("answers", 3072.0)


def test_answers_that_replaced_others_cost_as_much(tmp_path):
    steps = [{"time/step_s": 2.0, "rollout/resampled": share} for share in (0.0, 0.5, 0.25)]
    rollouts = {"rollout_batch_size": 8, "rollout_batches": 2}
    folder = artifact(tmp_path / "grpo", "grpo", steps, grpo=rollouts)
    ledger = SimpleNamespace(ancestors=lambda _: [(folder, Manifest.read(folder))])
    recipe = Recipe("a", "grpo", "grpo", {})
    assert cost(ledger, recipe, tmp_path) == (3, 6.0, 60)  # 3 * 16 answers, and a quarter more


@pytest.mark.slow
def test_a_study_resumes_compares_and_registers_the_median(project, tmp_path):
    recipes = tmp_path / "recipes.yml"
    recipes.write_text("{gentle: {pipeline: dpo, params: {dpo.beta: 1.0}}}")
    options = [f"--recipes={recipes}", "--no-open"]
    output = project.kedro(*options, "--seeds=1", command="rlhf study")
    assert "run 1 of 1: gentle, seed 1" in output and len(project.recipes("sft")) == 1

    output = project.kedro(*options, "--seeds=2", "--register=gentle", command="rlhf study")
    assert len(re.findall(r"^dpo: running as", output, re.MULTILINE)) == 1  # the second seed
    (file,) = (project.root / "08_reporting" / "study").glob("*/study.json")
    found = json.loads(file.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert {"gentle", "SFT", "the untouched model"} < rows.keys() and len(rows) == 5
    assert rows["SFT"]["rate"]["mean"] == 0.5
    rates = rows["gentle"]["rates"]
    assert [*rates] == ["1", "2"]
    assert found["conclusion"] in re.sub(r"\s+", " ", output)
    page = file.with_suffix(".html").read_text()
    assert "Study: gentle; seeds 1, 2" in page

    again = project.kedro(*options, "--seeds=2", command="rlhf study")
    assert "running as" not in again and json.loads(file.read_text()) == found
    (study,) = [run for run in project.runs() if "rlhf.study" in run.data.tags]
    children = [
        run for run in project.runs()
        if run.data.tags.get("mlflow.parentRunId") == study.info.run_id
    ]  # fmt: skip
    assert len(children) == 2 and study.info.status == "FINISHED"
    assert study.data.metrics["rate/gentle"] == pytest.approx(rows["gentle"]["rate"]["mean"])
    version = project.client().get_model_version_by_alias("rlhf-policy-tiny", "candidate")
    run = project.client().get_run(version.run_id)
    assert run.data.params["seed"] == min(rates, key=rates.get)  # of two, the lower one
