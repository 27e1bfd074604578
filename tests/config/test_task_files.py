"""Names and files of tasks, before a run starts."""

from pathlib import Path

import pytest

from rlhf_pipeline.config.evaluate import TasksConfig, _known_names, task_faults, task_inputs

harness = pytest.mark.usefixtures("_harness")


@pytest.fixture
def _harness():
    pytest.importorskip("lm_eval", reason="the extra `tasks` is not installed")


def write(folder, **texts):
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_what_a_task_names_is_an_input(tmp_path, monkeypatch):
    """Relative to its file or to the current folder, through includes and by patterns."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    template = "tasks/_template_yaml"  # as in the harness, without a suffix
    Path(template).write_text("doc_to_text: !function code.prompts.question\ninclude: more.yml")
    write(
        tmp_path,
        tasks__own_yaml=f"include: {Path(template).name}\n"
        "dataset_kwargs: {data_files: {test: 'data/part-*.jsonl', train: /no/such.jsonl}}\n"
        f"description: '{'A long text. ' * 30}'\n",
        tasks__more_yml="fewshot_config: {samples: shots.json}",
        tasks__shots_json="[]",
        tasks__code__prompts_py="def question(document): ...",
        **{"data__part-0_jsonl": "", "data__part-1_jsonl": "", "data__other_jsonl": ""},
    )
    files = task_inputs(TasksConfig(names=("arc_easy", "tasks/own.yaml")))
    assert [*files] == [f"tasks.{number}" for number in range(7)]
    assert [path.as_posix() for path in files.values()] == [
        "tasks/own.yaml",
        "tasks/_template_yaml",
        "data/part-0.jsonl",
        "data/part-1.jsonl",
        "tasks/code/prompts.py",
        "tasks/more.yml",
        "tasks/shots.json",
    ]
    assert task_inputs(None) == task_inputs(TasksConfig(names=("arc_easy",))) == {}


@harness
def test_a_misspelt_task_is_refused_with_the_nearest_name(tmp_path):
    (tmp_path / "broken.yaml").write_text("task: [")
    names = ("arc_easy", "hellaswagg", "mmlu", "ai2_arc", "tinyArc", str(tmp_path / "broken.yaml"))
    misspelt, broken = task_faults(TasksConfig(names=names))
    assert misspelt == (
        "evaluate.tasks.names.1: found hellaswagg (did you mean hellaswag?), expected FILE.yaml or "
        "a name of the lm-evaluation-harness. Fix: `lm-eval ls tasks` lists them"
    )
    assert broken.startswith(f"evaluate.tasks.names.5: found {names[5]}, expected a file of YAML: ")


@harness
@pytest.mark.slow
def test_every_name_of_the_harness_is_known():
    from lm_eval.tasks import TaskManager

    assert {*TaskManager().all_tasks} - _known_names() == set()
