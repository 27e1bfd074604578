"""Only what serves no published version goes; what is freed is what no other name keeps."""

import json
import os
import shutil

import pytest

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.runtime.manifest import content_digest
from rlhf_pipeline.runtime.processes import process_identity
from rlhf_pipeline.stages.cache.cleaning import remove, survey
from rlhf_pipeline.stages.cache.lock import recipe_lock


@pytest.fixture
def workspace(tmp_path):
    return tmp_path / "workspace"


def publish(directory, tmp_path):
    version = tmp_path / "published" / directory.parent.name / directory.name
    shutil.copytree(directory / "export", version, copy_function=os.link)
    return version


def fates(workspace, published=(), *, unfinished=False):
    leftovers, kept = survey(workspace, published, [], unfinished=unfinished)
    reasons = {
        leftover.path.relative_to(workspace).as_posix(): leftover.why for leftover in leftovers
    }
    return reasons, {path.relative_to(workspace).as_posix(): why for path, why in kept.items()}


def test_what_a_published_version_comes_from_stays_through_its_inputs(
    make_work, workspace, tmp_path
):
    source = make_work("source", "a", content="rows")
    split = make_work("split", "b", inputs={"source_0": content_digest(source / "export")})
    make_work("source", "c", content="other rows")
    make_work("sft", "d")
    reasons, kept = fates(workspace, [publish(split, tmp_path)])
    assert reasons == {
        "source/c000000000000000": "nothing published comes from it",
        "sft/d000000000000000": "nothing published comes from it",
    }
    assert kept == {}


def test_a_result_that_was_forced_again_goes_even_when_published(make_work, workspace, tmp_path):
    make_work("sft", "a", suffix=".2")
    make_work("sft", "a", suffix=".10")
    make_work("sft", "a", suffix=".11", finished=False)
    published = publish(make_work("sft", "a"), tmp_path)
    assert fates(workspace, [published])[0] == {
        "sft/a000000000000000": "made again since",
        "sft/a000000000000000.2": "made again since",
        "sft/a000000000000000.11": "unfinished",
    }


def test_unfinished_stages_with_a_checkpoint_and_their_inputs_stay_unless_asked_for(
    make_work, workspace
):
    source = make_work("source", "a", content="rows")
    inputs = {"source_0": content_digest(source / "export")}
    make_work("split", "b", inputs=inputs, finished=False, checkpoint=12)
    make_work("split", "c", inputs=inputs, finished=False)
    reasons, kept = fates(workspace)
    assert reasons == {"split/c000000000000000": "unfinished"}
    assert kept == {
        "split/b000000000000000": "goes on from step 12 when it is run again; --unfinished removes it"
    }
    assert list(fates(workspace, unfinished=True)[0]) == [
        "source/a000000000000000", "split/b000000000000000", "split/c000000000000000",
    ]  # fmt: skip


def test_a_damaged_result_goes(make_work, workspace, tmp_path):
    directory = make_work("sft", "a")
    published = publish(directory, tmp_path)
    (directory / "export" / "weights").unlink()
    assert fates(workspace, [published])[0] == {
        "sft/a000000000000000": "damaged: weights is missing"
    }


def test_what_a_living_process_uses_stays_with_its_inputs(make_work, workspace):
    source = make_work("source", "a", content="rows")
    split = make_work(
        "split", "b", inputs={"source_0": content_digest(source / "export")}, finished=False
    )
    with recipe_lock(split):
        pass
    reasons, kept = fates(workspace, unfinished=True)
    assert reasons == {}
    assert list(kept) == ["split/b000000000000000"]
    assert kept["split/b000000000000000"].startswith(f"in use by process {os.getpid()} since ")
    forget_users(workspace)
    assert len(fates(workspace)[0]) == 2


def forget_users(workspace):
    """As if the processes had ended."""
    for file in (workspace / ".locks").glob("*.json"):
        file.write_text(json.dumps({"driver": "1@0.0", "since": 0.0}))


def test_sizes_count_bytes_and_freed_ones_only_those_without_another_name(
    make_work, workspace, tmp_path
):
    one, two = (
        make_work("sft", "a", content="12345"),
        make_work("sft", "b", finished=False, content="123"),
    )
    (two / "export" / "weights").unlink()
    os.link(one / "export" / "weights", two / "again")  # both names go, so its bytes do
    os.link(two / "job.json", tmp_path / "elsewhere")  # this one stays under another name
    first, second = survey(workspace, [], [], unfinished=False)[0]
    job, manifest = len('{"digests": {}}'), (one / "export" / "manifest.json").stat().st_size
    assert (first.size, first.freed) == (5 + job + manifest, 5 + job + manifest)
    assert (second.size, second.freed) == (5 + job, 0)


def test_a_published_version_outlives_its_work_directory(make_work, workspace, tmp_path):
    directory = make_work("sft", "a", content="12345")
    published = publish(directory, tmp_path)
    (leftover,) = survey(workspace, [], [], unfinished=False)[0]
    assert leftover.freed == len(
        '{"digests": {}}'
    )  # job.json; the export's bytes are the version's, too
    assert remove(leftover, workspace) is None
    assert not directory.exists()
    assert (published / "weights").read_text() == "12345"


def test_what_was_taken_meanwhile_is_left(make_work, workspace):
    directory = make_work("sft", "a")
    (leftover,) = survey(workspace, [], [], unfinished=False)[0]
    with recipe_lock(directory):
        assert remove(leftover, workspace).startswith(
            f"process {process_identity(os.getpid()).partition('@')[0]} since"
        )
    assert (directory / "export" / "weights").is_file()


def test_half_published_versions_go_with_their_empty_folder(make_work, workspace, tmp_path):
    partial = tmp_path / "models" / "v1" / "sft_model.99.partial"
    partial.mkdir(parents=True)
    (partial / "weights").write_text("1234")
    (leftover,) = survey(workspace, [], [partial], unfinished=False)[0]
    assert (leftover.why, leftover.size, leftover.freed) == ("half published", 4, 4)
    remove(leftover, workspace)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_version_whose_origin_is_unknown_stops_it(make_work, workspace, tmp_path):
    published = publish(make_work("sft", "a"), tmp_path)
    (published / "manifest.json").unlink()
    (published / "manifest.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"manifest\.json is damaged"):
        survey(workspace, [published], [], unfinished=False)


def test_other_folders_in_the_workspace_are_none_of_its_business(workspace):
    (workspace / "sft" / "notes").mkdir(parents=True)
    (workspace / "mine" / "a000000000000000").mkdir(parents=True)
    assert fates(workspace) == ({}, {})


@pytest.mark.parametrize("linked", ["attempt", "stage"])
def test_nothing_is_removed_through_a_link(make_work, workspace, tmp_path, linked):
    directory = make_work("sft", "a", finished=False)
    there, elsewhere = (
        {"attempt": directory, "stage": directory.parent}[linked],
        tmp_path / "elsewhere",
    )
    there.rename(elsewhere)
    there.symlink_to(elsewhere)
    reasons, kept = fates(workspace)
    assert reasons == {}
    assert kept == {
        "sft/a000000000000000": f"a link leads to {directory.resolve()}; remove that yourself"
    }


def test_nor_through_a_link_in_what_is_removed(make_work, workspace, tmp_path):
    directory = make_work("sft", "a", finished=False)
    precious = tmp_path / "precious"
    (precious / "sub").mkdir(parents=True)
    (precious / "sub" / "file").write_text("12345")
    (directory / "folder").symlink_to(precious)
    (directory / "file").symlink_to(precious / "sub" / "file")
    (leftover,) = survey(workspace, [], [], unfinished=False)[0]
    assert remove(leftover, workspace) is None
    assert not directory.exists()
    assert (precious / "sub" / "file").read_text() == "12345"


def test_a_half_published_version_behind_a_link_stays(workspace, tmp_path):
    (tmp_path / "precious").mkdir()
    for version in ("v1", "v2"):
        (tmp_path / "models" / version).mkdir(parents=True)
    (tmp_path / "models" / "v1" / "sft_model.99.partial").symlink_to(tmp_path / "precious")
    (tmp_path / "precious" / "sft_model.99.partial").mkdir()
    (tmp_path / "models" / "v3").symlink_to(tmp_path / "precious")
    partials = sorted((tmp_path / "models").glob("*/*.partial"))
    assert len(partials) == 2
    leftovers, kept = survey(workspace, [], partials, unfinished=False)
    assert leftovers == [] and sorted(kept) == partials
