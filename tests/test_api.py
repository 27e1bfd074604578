"""The Python interface: `from rlhf_pipeline import run`, as docs/python.md shows it."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from made_by_hand import artifact
from processes import completed

import rlhf_pipeline
from rlhf_pipeline import evaluate, run, runs
from rlhf_pipeline.data.sources.synthetic import gold_score
from rlhf_pipeline.errors import ArtifactError, ConfigError
from rlhf_pipeline.runtime.manifest import content_digest
from rlhf_pipeline.verdict.answers import read_answers
from rlhf_pipeline.verdict.comparison import EVALUATION, read_evaluation

PROJECT = Path(__file__).parents[1]
PAGE = (PROJECT / "docs" / "python.md").read_text()
IMPORTED = """
import sys, rlhf_pipeline
print([name for name in ("kedro", "mlflow", "torch", "pydantic") if name in sys.modules])
from rlhf_pipeline import run
print([name for name in ("kedro.framework", "mlflow", "torch") if name in sys.modules])
"""


def test_every_rank_imports_the_package_and_nothing_else():
    done = completed(sys.executable, "-c", IMPORTED)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr


def test_type_checkers_know_the_names_and_no_module_hides_one():
    stub = Path(rlhf_pipeline.__file__).with_suffix(".pyi").read_text()
    assert sorted(re.findall(r"import (\w+) as \1$", stub, re.M)) == sorted(rlhf_pipeline.__all__)
    assert {*rlhf_pipeline.__all__} <= {*dir(rlhf_pipeline)}
    for name in rlhf_pipeline.__all__:
        assert getattr(rlhf_pipeline, name).__name__ == name
        place = Path(rlhf_pipeline.__file__).with_name(name)
        assert not place.exists() and not place.with_suffix(".py").exists()
    with pytest.raises(AttributeError, match="module 'rlhf_pipeline' has no attribute 'runn'"):
        rlhf_pipeline.runn  # noqa: B018


@pytest.mark.slow
def test_the_page_runs_on_finished_stages(project, tmp_path, capsys):
    """In one process, as in a notebook. Only the calls that would train are left out."""
    root = tmp_path / "data"
    shutil.copytree(project.root, root, symlinks=True)
    names: dict = {"__name__": "__main__"}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S):
        if "params=" not in block:
            here = f'env="tiny", params={{"root": {str(root)!r}}}'
            exec(block.replace('env="tiny"', here), names)
    printed = capsys.readouterr().out
    assert " ".join(PAGE.split()).count(" ".join(names["found"].summary.split())) == 1
    result = names["result"]
    assert result.evaluation.summary in printed
    assert (result.evaluation["candidate"], [*result.answers][:2]) == ("ppo", ["sft", "ppo"])
    stages = {"base_model", "split", "sft", "reward_model", "ppo", "evaluate"}
    assert result.artifacts.keys() == stages
    assert {path.parent.name for path in result.artifacts.values()} == {result.version}
    steps = [record["step"] for record in result.metrics("ppo")]
    assert steps == sorted(set(steps)) and steps[0] == 1
    for stage in ("sft", "ppo"):  # nothing has trained again
        assert len([*(root / "07_workspace" / stage).iterdir()]) == len(project.recipes(stage))
    assert names["each"] == result
    candidate = names["candidate"]
    assert candidate.stage == "ppo" and candidate.parameters()["ppo.kl.coef"] == 0.3
    assert candidate.metrics == result.evaluation["policies"]["ppo"]
    assert (names["tokenizer"].padding_side, names["model"].training) == ("left", False)
    split = run(env="tiny", params={"root": root}, to_nodes=["split"])
    assert split.artifacts.keys() == {"base_model", "split"}
    with pytest.raises(ArtifactError, match=r"found no evaluation, expected one\. Fix:"):
        split.evaluation  # noqa: B018


def test_errors_are_exceptions_that_name_the_fix(tmp_path, monkeypatch):
    here, root = Path.cwd(), {"root": tmp_path}
    with pytest.raises(ConfigError, match=r"ppo\.kl\.coef \(--params\): found 'x'"):
        run("full", params={"ppo": {"kl.coef": "x"}} | root)
    with pytest.raises(ConfigError, match=r"--pipeline: found 'ful' \(did you mean full\?\)"):
        run("ful", params=root)
    assert runs(params=root) == []
    assert Path.cwd() == here
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"'pyproject\.toml', but .* is a file"):
        runs(params={"root": "pyproject.toml"}, project=PROJECT / "docs")  # of the project
    with pytest.raises(ConfigError, match=r"project: found no project in .* Fix:"):
        runs()


def test_artifacts_are_those_of_the_last_round_and_none_of_five_folds(tmp_path):
    """A second reward model on a file is five models, none of which is the judge."""

    def made(place, stage, inputs, **config):
        return artifact(tmp_path / place, stage, inputs=inputs, place=place, **config)

    inputs, rounds = {}, []
    for number in range(1, 4):
        place = f"07_workspace/iterative_dpo/{number}/export"
        rounds.append(made(place, "iterative_dpo", inputs, table={"round": number}))
        inputs = {"sft_model": content_digest(rounds[-1])}
    for number in range(5):
        place = f"07_workspace/judge_model/{number}/export"
        fold = made(place, "judge_model", {}, fold={"number": number, "of": 5})
        inputs[f"judge_model.{number}"] = content_digest(fold)
    place = "08_reporting/evaluation/2026-01-01T00.00.00.000Z/evaluation"
    evaluation = made(place, "evaluate", inputs)
    (evaluation / EVALUATION).touch()
    (found,) = runs(params={"root": tmp_path})
    assert found.artifacts == {"evaluate": evaluation, "iterative_dpo": rounds[-1]}


@pytest.mark.slow
def test_the_texts_of_a_run_have_its_win_rate_with_equal_draws(project):
    """The gold judge as a function of the user gives the same numbers without a launch."""
    folder = project.newest("08_reporting/evaluation")
    answers, rates = read_answers(folder), read_evaluation(folder)["win_rates"]
    sft, ppo = ([a.response for a in answers[policy]] for policy in ("sft", "ppo"))
    prompts = [a.messages for a in answers["sft"]]

    def gold(prompts, responses):
        return [gold_score("synthetic", *row) for row in zip(prompts, responses, strict=True)]

    found = evaluate(prompts, ppo, sft, [{"callable": gold, "name": "quality"}])
    paired = {name: found.win_rate["paired"][name] for name in rates["gold"]["paired"]}
    assert paired == pytest.approx(rates["gold"]["paired"], rel=1e-6)
