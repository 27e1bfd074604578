"""A finished stage is reused if artifact and inputs are undamaged; a forced one runs again."""

import errno
import json
import logging
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from rank_fixtures import as_artifact

from rlhf_pipeline.errors import ArtifactError, ConfigError, ForeignFileError, StageError
from rlhf_pipeline.pipelines.table import stage_specs
from rlhf_pipeline.runtime.job import checkpoint_path, seal
from rlhf_pipeline.runtime.manifest import Manifest, file_entries, verify
from rlhf_pipeline.stages import run
from rlhf_pipeline.stages.cache.planning import Planner
from rlhf_pipeline.stages.job import forced_stages
from rlhf_pipeline.stages.run import StageRunner

pytestmark = pytest.mark.usefixtures("in_this_process")


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("result", "lunch 1", "export/result was changed after stage drill finished"),
        ("result", None, "export/result is missing"),
        ("manifest.json", '{"stage": "dr', "export/manifest.json is damaged"),
        ("manifest.json", None, "export is not a finished artifact: it has no manifest.json"),
    ],
)
def test_a_damaged_artifact_is_made_again(drill, recorder, caplog, file, content, named):
    export = drill.run()
    (export / file).unlink()
    if content is not None:
        (export / file).write_text(content)
    with caplog.at_level(logging.WARNING):
        assert drill.run(listener=recorder) == export
    assert (export / "result").read_text() == "launch 2"
    assert recorder.heard[0] == ("started", False)
    (warning,) = caplog.messages
    assert warning.startswith("stage drill: an artifact is not reused: ")
    assert named in warning
    assert drill.run() == export
    assert drill.launches == 2
    kept = list(export.parent.glob("export.damaged-*"))
    assert len(kept) == (0 if "no manifest" in named else 1)  # nobody finished it
    assert all((folder / "trusts").is_file() for folder in kept)


@contextmanager
def unreadable(name):
    """Files of this name cannot be read for a while, as on a network disk."""
    real = Path.open

    def open_(path, mode="r", *arguments, **options):
        if path.name == name and "r" in mode:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path, mode, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", open_)
        yield


def test_a_read_error_is_no_damage_of_a_finished_artifact(drill):
    export = drill.run()
    with unreadable("result"), pytest.raises(OSError, match="Stale file handle"):
        drill.run()
    assert drill.run() == export
    assert drill.launches == 1


def interrupted(drill):
    """A work directory with two checkpoints, a best model and metrics."""
    directory = drill.fail()
    for step in (900, 1000):
        checkpoint = checkpoint_path(directory / "checkpoints", step)
        checkpoint.mkdir(parents=True)
        (checkpoint / "rank0.safetensors").write_text(f"state {step}")
        seal(checkpoint, file_entries(checkpoint))
    best = directory / "checkpoints" / "best-00000900"
    best.mkdir()
    (best / "weights").write_text("best")
    (directory / "metrics.jsonl").write_text('{"step": 1000}\n')
    return directory


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_read_error_at_resume_stops_the_stage_and_removes_nothing(drill):
    directory = interrupted(drill)
    before = contents(directory / "checkpoints")
    message = r"step-00001000: found .*Stale file handle.* Fix: repeat the command"
    with unreadable("rank0.safetensors"), pytest.raises(StageError, match=message):
        drill.run()
    assert drill.launches == 1  # that of `interrupted`
    assert contents(directory / "checkpoints") == before
    assert (directory / "metrics.jsonl").read_text() == '{"step": 1000}\n'


def test_checkpoints_of_which_none_is_valid_are_set_aside_with_the_best_models(drill, caplog):
    directory = interrupted(drill)
    before = contents(directory / "checkpoints")
    for step in (900, 1000):
        file = checkpoint_path(directory / "checkpoints", step) / "rank0.safetensors"
        file.write_text(f"stat3 {step}")
    with caplog.at_level(logging.WARNING):
        verify(drill.run())
    (kept,) = directory.glob("checkpoints.damaged-*")
    assert f"stage drill: found no valid checkpoint; all are in {kept}" in caplog.messages
    found = contents(kept)
    assert found.pop("metrics.jsonl") == '{"step": 1000}\n'
    assert found["best-00000900/weights"] == "best"
    assert found.keys() == before.keys()
    assert found["step-00000900/rank0.safetensors"] == "stat3 900"


def test_the_export_is_on_the_disk_before_its_checkpoints_go(drill, monkeypatch):
    directory, happened = interrupted(drill), []
    force, remove = run.force_to_disk, shutil.rmtree
    monkeypatch.setattr(run, "force_to_disk", lambda path: happened.append(path) or force(path))
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, *a, **o: happened.append(path) or remove(path, *a, **o)
    )
    export = drill.run()
    order = [path for path in happened if path in (export, directory / "checkpoints")]
    assert order[-2:] == [export, directory / "checkpoints"]


@pytest.mark.parametrize("keep_best", [1, 2])
def test_a_finished_stage_keeps_only_the_best_models_that_were_asked_for(drill, keep_best):
    """Also one that was finished by an earlier version, or by a driver that was killed then."""
    directory = interrupted(drill)
    kept = {"best-00000900/weights": "best"} if keep_best > 1 else {}
    for _ in range(2):
        drill.run(keep_best=keep_best)
        checkpoints = directory / "checkpoints"
        assert checkpoints.exists() == bool(kept) and contents(checkpoints) == kept
        (checkpoints / "best-00000900").mkdir(parents=True, exist_ok=True)
        (checkpoints / "best-00000900" / "weights").write_text("best")
    assert drill.launches == 2  # with that of `interrupted`


def test_an_added_file_stops_the_stage_before_it_is_launched(drill):
    export = drill.run()
    (export / "notes.txt").write_text("by hand")
    message = r"export/notes\.txt was added after stage drill finished\. Fix: move it elsewhere"
    with pytest.raises(ForeignFileError, match=message):
        drill.run()
    (export / "notes.txt").rename(export / ".notes")
    assert drill.run() == export
    assert drill.launches == 1


def test_a_published_version_keeps_its_files_when_the_stage_runs_again(drill, tmp_path):
    export = drill.run()
    published = tmp_path / "published"
    shutil.copytree(export, published, copy_function=os.link)
    (export / "result").write_text("lunch 1")
    assert (published / "result").read_text() == "lunch 1"  # one file with two names
    drill.run()
    assert (published / "result").read_text() == "lunch 1"
    assert not (published / "result").samefile(export / "result")
    verify(export)


def test_identities_are_recorded_together_with_digests(drill, recorder, tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    job = drill.job(inputs={"source_0": tmp_path / "abc"}, identities={"source_1": "commit 5d0e"})
    export = StageRunner(drill.context(listener=recorder)).run(job)
    both = {  # printf abc | sha256sum
        "source_0": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        "source_1": "commit 5d0e",
    }
    assert Manifest.read(export).inputs == recorder.run.digests == both
    assert recorder.run.inputs == {"source_0": tmp_path / "abc"}
    launched = json.loads((export.parent / "job.json").read_text())
    assert launched["digests"] == both
    assert list(launched["inputs"]) == ["source_0"]


def test_a_changed_input_stops_the_stage(drill, tmp_path):
    source = tmp_path / "input"
    source.mkdir()
    (source / "weights").write_text("abc")
    as_artifact(source)
    (source / "weights").write_text("abd")
    with pytest.raises(ArtifactError, match="weights was changed"):
        drill.run(inputs={"sft_model": source})
    assert drill.launches == 0


def test_trust_reaches_the_program_and_changes_the_recipe(drill):
    export = drill.run()
    assert (export / "trusts").read_text() == "False"
    trusted = drill.run(trust=True)
    assert trusted != export and (trusted / "trusts").read_text() == "True"
    assert "trust_remote_code" not in json.loads((export.parent / "recipe.json").read_text())
    assert json.loads((trusted.parent / "recipe.json").read_text())["trust_remote_code"] is True


ALL = [
    *"source base_model split sft reward_base critic_base teacher".split(),
    *"reward_model sample judge_split judge_model".split(),
    *"ppo grpo distill dpo kto rejection iterative_dpo".split(),
    *"tasks evaluate evaluate_grpo evaluate_distill evaluate_dpo evaluate_kto".split(),
    *"evaluate_rejection evaluate_iterative_dpo evaluate_champion evaluate_untouched".split(),
]


@pytest.mark.parametrize(
    ("value", "stages"),
    [
        (None, []),
        (False, []),
        ("ppo", ["ppo"]),
        ("sft ppo", ["sft", "ppo"]),
        (["sft", "source"], ["sft", "source"]),
        (True, ALL),
    ],
)
def test_force_is_true_or_names(value, stages):
    assert forced_stages(value, stage_specs()) == frozenset(stages)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("pppo", rf"no stage 'pppo' \(did you mean ppo\?\); the stages are {', '.join(ALL)}"),
        (["register"], "no stage 'register'"),
        (3, "found 3, expected true, a stage, or a list of stages"),
    ],
)
def test_unknown_stages_are_refused(value, message):
    with pytest.raises(ConfigError, match=f"force: {message}"):
        forced_stages(value, stage_specs())


def test_a_forced_stage_runs_once_per_run(drill):
    first = drill.run()
    context = drill.context(force=["drill"])
    runner = StageRunner(context)
    predicted = Planner(context).run(drill.job())
    second = runner.run(drill.job())
    assert runner.run(drill.job()) == second == predicted  # another node needs it, too
    assert (second.parent.name, drill.launches) == (first.parent.name + ".2", 2)
    assert (first / "result").read_text() == "launch 1"
    assert (drill.run() / "result").read_text() == "launch 2"
    assert drill.run(force=["drill"]).parent.name == first.parent.name + ".3"


def test_a_forced_run_that_fails_leaves_the_finished_result_in_use(drill):
    first = drill.run()
    drill.fail(force=["drill"])
    assert drill.run() == first
    assert (drill.launches, (first / "result").read_text()) == (2, "launch 1")
    # The next forced run continues the failed attempt.
    assert drill.run(force=["drill"]).parent.name == first.parent.name + ".2"


def test_force_does_not_leave_the_directory_of_an_unfinished_stage(drill):
    directory = drill.fail()
    assert drill.run(force=["drill"]).parent == directory
