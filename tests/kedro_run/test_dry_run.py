"""The driver asks programs of its own, which end in time and leave nothing behind."""

import logging
import os
import re
import time

import psutil
import pytest
from ppo_runs import ppo_config

from rlhf_pipeline.config.episodes import EpisodesConfig
from rlhf_pipeline.config.evaluate import TasksConfig
from rlhf_pipeline.config.rewards import CallableReward, CodeReward, ReferenceReward
from rlhf_pipeline.config.split import BlendedSourceConfig
from rlhf_pipeline.data.records import Example, Message
from rlhf_pipeline.data.sources.registry import FirstRows
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.kedro_run import dry_run
from rlhf_pipeline.kedro_run.checks import check_values
from rlhf_pipeline.kedro_run.dry_run import (
    careful_faults,
    episode_faults,
    model_faults,
    scorer_faults,
    task_faults,
)

SOURCE = BlendedSourceConfig(name="files", path="a.jsonl")


def row(**fields):
    return Example((Message("user", "2 + 3?"),), **fields)


def first(*rows, is_uniform=True):
    """A source with these first rows."""
    found = FirstRows({f"a.jsonl:{number}": each for number, each in enumerate(rows, start=1)})
    found.is_uniform = is_uniform
    return SOURCE, found


KNOWN = [first(row())]


@pytest.fixture
def faults(tmp_path):
    """The faults of a function with this body, which counts its calls in a file."""
    file, calls = tmp_path / "my.py", tmp_path / "calls"

    def faults(body, rows=KNOWN, together=1, **fields):
        count = f"open({str(calls)!r}, 'a').write('x')"
        text = f"import os, sys, time\ndef f(prompts, responses):\n    {count}\n    {body}\n"
        if not file.is_file() or file.read_text() != text:
            file.write_text(text)
        given = {"grpo.rewards.0": CallableReward(callable=f"{file}:f", **fields)}
        blocks = {"grpo": ppo_config(rollout_batch_size=64, responses_per_prompt=together)}
        found = [*scorer_faults(given, rows, {}, blocks, tmp_path / "work")]
        said = [fault.replace(str(file), "my.py") for fault in found]
        return said, len(calls.read_text()) if calls.is_file() else 0

    return faults


def test_a_function_without_a_fault_is_called_again_only_after_a_change(faults, tmp_path):
    assert faults("return [1.0] * 3") == ([], 1)
    assert faults("return [1.0] * 3") == ([], 1)
    assert faults("return [2.0] * 3") == ([], 2)
    assert faults("return [2.0] * 3", [first(row(reference="5"))]) == ([], 3)
    for known in (tmp_path / "work" / ".dry_runs").iterdir():
        assert known.read_bytes() == b"", "it contains no prompt"


@pytest.mark.parametrize(
    ("body", "changes", "message"),
    [
        ("def f(a: int) -> int: 'Add.'; return a", {"tools": ["f"]},
         "grpo.tools.0: found .*expected type hints, and a docstring .*Fix: add them"),
        ("def g(): pass", {"tools": ["f"]}, r"grpo\.tools\.0: found functions g .*expected f"),
        ("import nowhere", {"environment": "f"}, "grpo.environment cannot be imported: ModuleNotF"),
        ("class f:\n def reset(self, task): return task['messages']", {"environment": "f"}, None),
    ],
)  # fmt: skip
def test_tools_and_environments_are_tried_before_a_run(tmp_path, body, changes, message):
    file = tmp_path / "my.py"
    file.write_text(body)
    named = {
        name: [f"{file}:{one}" for one in given] if name == "tools" else f"{file}:{given}"
        for name, given in changes.items()
    }
    found = [*episode_faults("grpo", EpisodesConfig(**named), [row()], tmp_path / "work")]
    assert len(found) == (message is not None)
    if message is not None:
        assert re.search(message, found[0], re.DOTALL)


@pytest.mark.parametrize("plays", [True, False])
def test_a_reward_may_ask_for_the_episode_of_a_policy_with_turns(tmp_path, plays):
    file = tmp_path / "my.py"
    file.write_text("def f(prompts, responses, episode): return [e['turns'] for e in episode]")
    given = {"grpo.rewards.0": CallableReward(callable=f"{file}:f")}
    blocks = {"grpo": ppo_config(tools=["my.py:g"] if plays else [])}
    sources = {0: BlendedSourceConfig(name="files", path="a.jsonl")}
    found = [*scorer_faults(given, KNOWN, sources, blocks, tmp_path / "work")]
    assert bool(found) != plays and all("asks for episode" in fault for fault in found)


def test_an_environment_that_does_not_begin_is_a_warning(tmp_path, caplog):
    file = tmp_path / "my.py"
    file.write_text("class f:\n    def reset(self, task): raise ValueError(task['reference'])")
    config = EpisodesConfig(environment=f"{file}:f")
    assert [*episode_faults("grpo", config, [row(reference="x")], tmp_path / "work")] == []
    assert "grpo.environment: reset failed: ValueError: x" in caplog.text


def test_a_function_is_not_called_on_made_up_data(faults):
    for rows in ([], [first(is_uniform=False)]):
        assert faults("raise KeyError", rows) == ([], 0)


def test_a_function_that_fails_is_called_each_time_and_stops_no_run(faults, caplog, tmp_path):
    for calls in (2, 4):  # with all responses, and again with the first one alone
        assert faults("assert not responses") == ([], calls)
        said = caplog.records[-1].getMessage()
        assert said.startswith(f"grpo.rewards.0: {tmp_path}/my.py:f failed at the response 'The ")
        assert "my.py, line 4). The run starts nevertheless" in said


def test_a_function_gets_several_answers_to_a_prompt_as_in_training(faults, caplog):
    """Different ones, so that a function may divide by their spread."""
    rows = [first(*(Example((Message("user", text),)) for text in "abc"))]
    body = "n = len(responses) // 8; assert prompts == prompts[:n] * 8; "
    body += "assert len(set(map(len, responses[::n]))) > 1; return [0.0] * len(responses)"
    assert faults(body, rows, together=8)[0] == []
    assert "The run starts nevertheless" not in caplog.text


def test_processes_get_a_few_answers_whatever_the_batch_has(faults):
    assert faults("return [1.0]", processes=1, together=64) == ([], 3)


def test_a_function_in_the_home_folder_that_leaves_a_fork_behind_has_one_answer(
    faults, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert faults("os.fork(); return [1.0] * 3") == ([], 1)
    given = {"grpo.rewards.0": CallableReward(callable="~/my.py:f")}
    assert [*scorer_faults(given, KNOWN, {}, {}, tmp_path / "home")] == []
    assert (tmp_path / "calls").read_text() == "xx"
    assert faults("os.fork(); return None")[0] != []


def test_a_function_that_ends_its_process_is_named(faults):
    assert faults("print('sorry', flush=True); os._exit(3)")[0] == [
        "grpo.rewards.0: my.py:f ended its process with code 3 (sorry). Fix: correct it"
    ]


def test_a_function_without_end_is_ended_with_all_that_it_started(faults, monkeypatch, caplog):
    monkeypatch.setattr(dry_run, "LOAD_S", 4.0)
    monkeypatch.setenv("DRY_RUN_TEST", mark := str(time.time()))
    caplog.set_level(logging.INFO)
    assert faults("os.fork(); time.sleep(99)", processes=1, timeout_s=0.1)[0] == []
    assert "my.py:f: no result after 4.3 s; not checked before the run" in caplog.text
    others = [each for each in psutil.process_iter(["environ"]) if each.pid != os.getpid()]
    marks = [(each.info["environ"] or {}).get("DRY_RUN_TEST") for each in others]
    assert mark not in marks


def test_a_machine_without_bubblewrap_is_refused_before_the_first_stage(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    (fault,) = scorer_faults({"ppo.rewards.0": CodeReward(code="python")}, [], {}, {}, tmp_path)
    assert fault.startswith("ppo.rewards.0: sandbox: found no program bwrap, expected bubblewrap")


def test_true_answers_that_no_row_has_are_missed(tmp_path):
    def faults(*rows):
        reader = {"grpo.rewards.0": ReferenceReward(reference="last_number")}
        return [*scorer_faults(reader, rows, {}, {}, tmp_path)]

    (fault,) = faults(*KNOWN)
    assert fault.startswith(
        "grpo.rewards.0: found no true answer in the first rows of files (a.jsonl), expected one "
        "for each prompt, as last_number reads it. Fix: set columns.reference of the source"
    )
    unknown = first(is_uniform=False)
    for rows in ([first(row(), row(reference="5"))], [unknown], [*KNOWN, unknown], []):
        assert faults(*rows) == [], "the split decides"


def test_a_program_looks_at_models_only_for_adapters_and_teachers(changed, tmp_path, monkeypatch):
    """It takes seconds."""
    monkeypatch.setattr(dry_run, "PROGRAM", "no_such_program")
    teacher = {"distill": {"teacher": str(tmp_path)}}
    layers = {"sft.lora": {"target_modules": ["q_proj"]}}
    for given, nodes, asked in (
        ({"base_model": {"path": str(tmp_path)}, "sft.lora": {}}, {"base_model", "sft"}, ""),
        (layers, {"base_model", "sft"}, "base_model"),
        (layers, {"base_model", "dpo"}, ""),
        (teacher, {"distill"}, "base_model, distill.teacher"),
        (teacher, {"sft"}, ""),
        ({"distill": {"teacher": "someone/model"}}, {"distill"}, ""),
    ):
        faults = [*model_faults(check_values(changed(given)), nodes, tmp_path / "work")]
        said = f"{asked}: tokenizers and layers ended its process with code 1 "
        assert [fault[: len(said)] for fault in faults] == [said] * bool(asked), (given, nodes)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (20 * [{"chosen": "a", "rejected": "b"}], None),
        (19 * [{"chosen": "a", "rejected": "b"}], "found comparisons of 19 prompts, expected at "
         "least 20, for five models in turn are measured on a fifth by all 1 ranks. Fix: add"),
        (20 * [{"chosen": "a"}], "found one answer in a row, expected chosen and rejected in"),
    ],
)  # fmt: skip
def test_careful_comparisons_are_looked_at_before_a_run(rows, message):
    prompts = [(Message("user", f"{number}?"),) for number in range(len(rows))]
    examples = [Example(prompt, **row) for prompt, row in zip(prompts, rows, strict=True)]
    found = FirstRows({f"a:{number}": row for number, row in enumerate(examples)})
    assert [*careful_faults(found, 1)] == [] or "one answer" in message, "other rows may follow"
    found.is_whole = True
    faults = [*careful_faults(found, 1)]
    assert [fault.startswith(f"evaluate.judge_model.path: {message}") for fault in faults] == (
        [True] if message else []
    )
    assert message or "at least 40, for five models" in next(careful_faults(found, 8))


def test_only_a_run_that_evaluates_asks_the_harness_about_its_tasks(changed, harness, tmp_path):
    """It is asked once about names that it knows, and not about files."""
    for names, nodes in ((["bad"], "sft"), (["good", "own.yaml"], "evaluate")):
        blocks = check_values(changed({"evaluate.tasks": {"names": names}}))
        for _ in range(2):
            dry_run.dry_run(blocks, {nodes}, tmp_path, 1)
    assert harness() == ["good"]
    blocks = check_values(changed({"evaluate.tasks": {"names": ["good", "bad"]}}))
    with pytest.raises(ConfigError, match=r"^evaluate\.tasks\.names: Tasks not found: bad\. Fix: "):
        dry_run.dry_run(blocks, {"evaluate_dpo"}, tmp_path, 1)
    assert harness() == ["good", "good,bad"]


def test_a_misspelt_task_is_refused(tmp_path):
    pytest.importorskip("lm_eval", reason="the extra `tasks` is not installed")
    names = ("arc_easy", "hellaswagg", "mmlu", "ai2_arc", "tinyArc", "own.yaml")
    assert [*task_faults(TasksConfig(names=names), tmp_path)] == [
        "evaluate.tasks.names: Tasks not found: hellaswagg. Fix: `lm-eval ls tasks` lists the names"
    ]
