"""`kedro rlhf evaluate`: models that no stage made are judged on the same prompts."""

import json
import shlex
import shutil

import pytest
from click.testing import CliRunner
from conftest import PROJECT
from documented_commands import commands
from kedro.framework.startup import bootstrap_project

from rlhf_pipeline.cli import cli
from rlhf_pipeline.commands.evaluate import evaluation_config, judge_of, labels, source_of
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.errors import ConfigError

JUDGE = "def score(prompts, responses):\n    return [sum(map(str.isdigit, r)) for r in responses]\n"
(PRINTED,) = [
    command
    for command in commands(PROJECT / "README.md")
    if command.startswith("kedro rlhf evaluate ")
]


@pytest.fixture
def models(make_model, tmp_path):
    """Two folders of transformers whose templates differ, so that their tokens do."""
    folders = [tmp_path / name for name in ("sft", "two")]
    for seed, folder in enumerate(folders):
        shutil.copytree(make_model("llama", seed=seed), folder)
        (folder / "token_contract.json").unlink()
    template = folders[1] / "chat_template.jinja"
    template.write_text(template.read_text().replace("Human", "Person"))
    return [str(folder) for folder in folders]


@pytest.mark.slow
def test_two_folders_have_one_verdict_in_either_order_and_are_found_again(
    new_project, models, tmp_path
):
    """By the arguments that the README prints: only paths are others."""
    project = new_project(tmp_path / "data")
    prompts, judge = tmp_path / "prompts.jsonl", tmp_path / "my.py"
    rows = [{"prompt": f"what is the colour of {n}?"} for n in range(12)]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    judge.write_text(JUDGE)
    words = shlex.split(PRINTED.replace("my.py", str(judge)))[3:]
    assert {"A", "B", "FILE"} <= {*words}

    def run(first, second):
        places = {"A": first, "B": second, "FILE": str(prompts)}
        given, params = [places.get(word, word) for word in words], "launch.processes=1"
        shown = project.kedro(*given, params=params, command="rlhf evaluate")
        folder = max(project.recipes("evaluate_models"), key=lambda path: path.stat().st_mtime)
        return shown, json.loads((folder / "export" / "evaluation.json").read_text())

    shown, found = run(*models)
    assert [*found["policies"]] == ["sft", "two"] and "two against the sft model." in shown
    assert "kl" not in found["policies"]["two"] and found["policies"]["sft"]["kl"] == 0
    again, _ = run(*models)
    assert "running" not in again and "evaluate_models: reused" in again
    _, turned = run(*models[::-1])
    rate, mirrored = (each["win_rates"]["my.score"] for each in (found, turned))
    assert mirrored["rate"] == pytest.approx(1 - rate["rate"])
    assert (mirrored["wins"], mirrored["losses"]) == (rate["losses"], rate["wins"])
    assert mirrored["lower"] == pytest.approx(1 - rate["upper"])
    assert "the my.score judge prefers" in project.kedro(*models, command="rlhf compare")
    project.kedro(models[0], command="rlhf lineage")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one"], "MODELS: found one alone, expected two or more"),
        (["one", "two"], "--judge: found none, expected at least one, because evaluate.judges is"),
        (["one", "two", "--judge={reference"], "--judge: found {reference, expected a mapping in"),
        (["one", "two", "--judge=exact", "--prompts={tmp}/questions.jsonl"],
         "--prompts: source files (questions.jsonl): the columns do not say which of them to read; "
         "they are 'question'. Fix: --prompts '{path: FILE, columns: {prompt: COLUMN, reference: "
         "COLUMN}}'"),
        (["one", "two", "--judge={tmp}/judge.py:nothing", "--prompts={path: {tmp}/questions.jsonl, "
          "columns: {prompt: question}}"],
         "judge.py:nothing: found None, expected a list of 3 numbers, one for each response."),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_before_a_launch(tmp_path, arguments, message):
    (tmp_path / "questions.jsonl").write_text('{"question": "Why?"}\n' * 3)
    (tmp_path / "judge.py").write_text("def nothing(prompts, responses): ...\n")
    arguments = [each.replace("{tmp}", str(tmp_path)) for each in arguments]
    arguments += ["--env=tiny", f"--params=root={tmp_path / 'root'}"]
    project = bootstrap_project(PROJECT)
    done = CliRunner().invoke(cli, ["rlhf", "evaluate", *arguments], obj=project)
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())
    assert "running" not in done.output
    assert not (tmp_path / "root" / "07_workspace").exists()


def test_models_have_short_names_of_their_own():
    names = ["/a/qwen", "b/qwen", "org/big model", "3", "/a/qwen/"]
    assert labels(names) == ["qwen", "qwen-2", "big-model", "3", "qwen-3"]
    assert labels(["/a/reward", "/b/reward"]) == ["reward-2", "reward-3"]
    assert labels(["champion", "/a/champion"]) == ["champion", "champion-2"]


def test_options_become_the_parameters(tmp_path):
    """All models draw equally many answers, and all prompts are the test."""
    given = EvaluateConfig(best_of_n=4, sampling={"max_response_tokens": 8})
    config = evaluation_config(given, ["exact"])
    assert (config.answers_per_prompt, config.baseline_draws, config.best_of_n) == (2, 2, 0)
    assert judge_of("judge.py:score") == "judge.py:score"
    assert judge_of(str(tmp_path)) == {"model": str(tmp_path), "retokenize": True}
    assert judge_of("{openai: {model: m}}") == {"openai": {"model": "m"}}
    source = source_of("{path: a.jsonl, columns: {prompt: question, reference: answer}}")
    assert source.is_test and source.columns.reference == "answer"
    with pytest.raises(ConfigError, match=r"--prompts\.size"):
        source_of("{path: a.jsonl, size: 3}")
