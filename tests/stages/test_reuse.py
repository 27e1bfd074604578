"""A finished stage is reused if artifact and inputs are undamaged; one recipe is launched once."""

import json
import logging
import multiprocessing
import os
import shutil

import pytest

from rlhf_pipeline.errors import ArtifactError, ForeignFileError
from rlhf_pipeline.runtime.manifest import Manifest, file_entries, verify
from rlhf_pipeline.stages.run import StageRunner


def flip_a_byte(export):
    (export / "result").write_text("lunch 1")


def lose_a_file(export):
    (export / "result").unlink()


def lose_half_the_manifest(export):
    manifest = export / "manifest.json"
    manifest.write_text(manifest.read_text()[:100])


def lose_the_manifest(export):
    (export / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip_a_byte, "export/result was changed after stage drill finished"),
        (lose_a_file, "export/result is missing"),
        (lose_half_the_manifest, "export/manifest.json is damaged"),
        (lose_the_manifest, "export is not a finished artifact: it has no manifest.json"),
    ],
)
def test_a_damaged_artifact_is_made_again(drill, recorder, caplog, damage, named):
    export = drill.run()
    damage(export)
    with caplog.at_level(logging.WARNING):
        assert drill.run(listener=recorder) == export
    assert (export / "result").read_text() == "launch 2"
    assert recorder.heard[0] == ("started", False)
    (warning,) = caplog.messages
    assert warning.startswith("stage drill: an artifact is not reused: ")
    assert named in warning
    assert drill.run() == export
    assert drill.launches == 2


def test_an_added_file_stops_the_stage_before_it_is_launched(drill):
    export = drill.run()
    (export / "notes.txt").write_text("by hand")
    with pytest.raises(
        ForeignFileError,
        match=r"export/notes\.txt was added after stage drill finished\. Fix: move it elsewhere",
    ):
        drill.run()
    (export / "notes.txt").rename(export / ".notes")
    assert drill.run() == export
    assert drill.launches == 1


def test_a_published_version_keeps_its_files_when_the_stage_runs_again(drill, tmp_path):
    export = drill.run()
    published = tmp_path / "published"
    shutil.copytree(export, published, copy_function=os.link)
    flip_a_byte(export)
    assert (published / "result").read_text() == "lunch 1"  # one file with two names
    drill.run()
    assert (published / "result").read_text() == "lunch 1"
    assert not (published / "result").samefile(export / "result")
    verify(export)


def test_two_processes_with_one_recipe_launch_it_once(drill, recorder):
    fork = multiprocessing.get_context("fork")
    at_once, answers = fork.Barrier(2), fork.Queue()

    def run():
        at_once.wait(timeout=600)
        answers.put((str(drill.run(listener=recorder)), *recorder.heard[0]))

    processes = [fork.Process(target=run) for _ in range(2)]
    for process in processes:
        process.start()
    found = sorted(answers.get(timeout=600) for _ in processes)
    for process in processes:
        process.join(timeout=600)
    (directory,) = (drill.root / "workspace" / "drill").iterdir()
    export = directory / "export"
    assert found == [(str(export), "started", False), (str(export), "started", True)]
    assert drill.launches == 1
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
    Manifest("sft", "", 1, {}, {}, {}, {}, file_entries(source)).write(source)
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
