"""Artifacts in the catalog: published completely or not, also in a store, and read back."""

import logging
import os
import re
from unittest.mock import patch
from urllib.parse import quote

import pytest
from kedro.io import DataCatalog, Version
from kedro.io.core import DatasetError

from rlhf_pipeline.datasets import artifact
from rlhf_pipeline.datasets.artifact import ArtifactDataset, PageDataset, StoreDataset
from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.runtime.manifest import Manifest, file_entries, verify
from rlhf_pipeline.stages.processes import this_process
from rlhf_pipeline.storage import store
from rlhf_pipeline.storage.store import Store, StoreError

V1, V2 = "2026-01-01T00.00.00.000Z", "2026-01-02T00.00.00.000Z"


@pytest.fixture
def finished(tmp_path):
    folder = tmp_path / "export"
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_text("abc")
    (folder / "report.json").write_text("{}")
    (folder / "sub" / "more").write_text("d")
    Manifest("sft", "f", 1, {}, {}, {}, {}, file_entries(folder)).write(folder)
    return folder


def dataset(tmp_path, save=V1, load=None, **options):
    return ArtifactDataset(
        filepath=str(tmp_path / "models" / "sft_model"), version=Version(load, save), **options
    )


@pytest.fixture
def shared(tmp_path):
    """Makes the data set of a machine that shares a store with others."""
    url = str(tmp_path / "store")
    return lambda machine, *version, **load: dataset(
        tmp_path / machine, *version, **load, store=url
    )


def test_publishing_links_and_copies_nothing(finished, tmp_path):
    catalog = dataset(tmp_path, V1)
    catalog.save(finished)
    published = catalog.load()
    assert published == tmp_path / "models" / "sft_model" / V1 / "sft_model"
    assert (published / "sub" / "more").samefile(finished / "sub" / "more")


def test_latest_refers_to_the_newest_version_and_is_no_version_itself(finished, tmp_path):
    for version in (V1, V2):
        dataset(tmp_path, version).save(finished)
    latest = tmp_path / "models" / "sft_model" / "latest"
    assert latest.resolve() == dataset(tmp_path, "v").load()
    assert str(latest.readlink()) == "2026-01-02T00.00.00.000Z/sft_model"
    assert [path.parent.name for path in dataset(tmp_path, "v").versions()] == [V1, V2]


def test_an_unfinished_directory_is_refused(tmp_path):
    (tmp_path / "export").mkdir()
    with pytest.raises(DatasetError, match="is not a finished artifact"):
        dataset(tmp_path, "v1").save(tmp_path / "export")
    assert not (tmp_path / "models").exists()


def test_an_interrupted_publication_leaves_no_version(finished, tmp_path, monkeypatch):
    dataset(tmp_path, V1).save(finished)
    monkeypatch.setattr("os.link", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        dataset(tmp_path, V2).save(finished)
    assert dataset(tmp_path, "2026-01-03T00.00.00.000Z").load().parent.name == V1


def test_an_interrupted_publication_is_abandoned_when_its_process_is_gone(
    finished, tmp_path, monkeypatch
):
    """Of another container, nobody here knows that."""
    models = tmp_path / "models" / "sft_model"

    def killed(*arguments):
        os._exit(9)

    for version in ("v1", "v2"):
        pid = os.fork()
        if pid == 0:
            monkeypatch.setattr(os, "link", killed)
            dataset(tmp_path, version).save(finished)
        os.waitpid(pid, 0)
    (first,), (second,) = (models.glob(f"{version}/*.partial") for version in ("v1", "v2"))
    assert dataset(tmp_path, "v").abandoned() == [first, second]
    first.rename(first.with_name(first.name.replace("%2F", "0%2F", 1)))
    assert dataset(tmp_path, "v").abandoned() == [second]
    second.rename(first.with_name(f"sft_model.{quote(this_process(), safe='@')}.partial"))
    assert dataset(tmp_path, "v").abandoned() == []


def test_a_version_is_on_the_disk_before_it_has_its_name(finished, tmp_path, monkeypatch):
    happened, force, rename = [], artifact.force_to_disk, os.rename
    monkeypatch.setattr(
        artifact, "force_to_disk", lambda path: happened.append(("force", path)) or force(path)
    )
    monkeypatch.setattr(
        os, "rename", lambda one, two: happened.append(("rename", one)) or rename(one, two)
    )
    dataset(tmp_path, "v1").save(finished)
    (what, forced), (then, renamed) = happened
    assert (what, then) == ("force", "rename") and forced == renamed


def test_a_published_version_is_not_replaced(finished, tmp_path):
    dataset(tmp_path, "v1").save(finished)
    with pytest.raises(DatasetError):
        dataset(tmp_path, "v1").save(finished)
    verify(dataset(tmp_path, "v1").versions()[0])
    assert dataset(tmp_path, "v1").abandoned() == []


@pytest.mark.parametrize(
    ("version", "wrong"), [("2931-01-01T00.00.00.000Z", True), (V1, False), ("zero", False)]
)
def test_a_version_later_than_now_is_a_fault(finished, tmp_path, version, wrong):
    assert dataset(tmp_path, "v").clock_fault() is None
    dataset(tmp_path, version).save(finished)
    fault = dataset(tmp_path, "v").clock_fault()
    assert fault == (
        f"{tmp_path}/models/sft_model: found version {version}, expected none later than now. "
        "Fix: correct the clock, or rename it"
        if wrong
        else None
    )


def test_a_full_disk_leaves_no_version_and_takes_no_space(finished, disk):
    """On another disk than the work directory, so files are copied."""
    (finished / "large").write_bytes(bytes(2**20))
    Manifest("sft", "f", 1, {}, {}, {}, {}, file_entries(finished)).write(finished)
    disk.leave(2**19)
    with pytest.raises(DatasetError) as caught:
        dataset(disk.path, V1).save(finished)
    assert isinstance(caught.value.__cause__, StageError)
    assert re.search(
        "stage sft is finished in .*/export but not published as .*/sft_model", str(caught.value)
    )
    assert "[Errno 28] No space left on device: " in str(caught.value)
    assert "  space    0.5 of 8.0 MiB are free on the file system of " in str(caught.value)
    assert dataset(disk.path, V2).versions() == []
    disk.make_room()
    catalog = dataset(disk.path, V2)
    catalog.save(finished)
    verify(catalog.load())


def test_a_run_reads_its_own_version_although_another_one_is_newer(finished, tmp_path):
    mine = dataset(tmp_path, V1)
    mine.save(finished)
    dataset(tmp_path, V2).save(finished)
    assert mine.load().parent.name == V1
    assert dataset(tmp_path, "2026-01-03T00.00.00.000Z").load().parent.name == V2


def test_a_page_is_text_that_is_loaded_as_the_path_of_its_own_version(tmp_path):
    def page(save):
        return PageDataset(filepath=str(tmp_path / "page.html"), version=Version(None, save))

    mine, theirs = page(V1), page(V2)
    mine.save("<p>\N{CHECK MARK}")
    theirs.save("<p>newer")
    mine.release()  # as a run does after the last node that reads it
    assert mine.load() == tmp_path / "page.html" / V1 / "page.html"
    assert mine.load().read_text(encoding="utf-8") == "<p>\N{CHECK MARK}"
    assert [path.parent.name[:10] for path in mine.versions()] == ["2026-01-01", "2026-01-02"]
    assert page("2026-01-03T00.00.00.000Z").load() == theirs.load()


def test_the_preview_is_a_table_of_the_metrics_by_name(finished, tmp_path):
    metrics = {"win_rate/gold": 0.75, "kl/policy": 12.34567}
    Manifest("sft", "f", 1, {}, {}, {}, metrics, file_entries(finished)).write(finished)
    catalog = dataset(tmp_path, V1)
    catalog.save(finished)
    assert catalog.preview() == {
        "index": [0, 1],
        "columns": ["metric", "value"],
        "data": [["kl/policy", "12.35"], ["win_rate/gold", "0.75"]],
    }


def test_a_version_on_s3_is_read_on_another_machine_with_kedros_credentials(
    bucket, s3_server, finished, tmp_path, monkeypatch, caplog
):
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    keys = {"key": "access", "secret": "secret", "client_kwargs": {"endpoint_url": s3_server[0]}}
    kind, url = "rlhf_pipeline.datasets.artifact", "s3://bucket/models"
    shared = {"credentials": "s3"}

    def catalog(machine, version):
        model = {
            "type": f"{kind}.ArtifactDataset", "filepath": str(tmp_path / machine / "sft_model"),
            "versioned": True, "store": url,
        }  # fmt: skip
        entries = {"sft_model": model, "store": {"type": f"{kind}.StoreDataset", "url": url}}
        entries = {name: entry | shared for name, entry in entries.items()}
        return DataCatalog.from_config(entries, {"s3": keys}, save_version=version)

    with caplog.at_level(logging.DEBUG):
        one = catalog("one", V1)
        assert not one.exists("sft_model")
        one.load("store").push(finished, "stages/sft/f.json")
        sent = {path.name for path in (bucket / "models" / "objects").iterdir()}
        one.save("sft_model", finished)
        assert one.load("sft_model") == tmp_path / "one" / "sft_model" / V1 / "sft_model"
        assert (one.load("sft_model") / "weights").samefile(finished / "weights")
        # A stage and its version share their files.
        assert {path.name for path in (bucket / "models" / "objects").iterdir()} == sent
        assert (bucket / "models" / "versions" / "sft_model" / f"{V1}.json").is_file()
        two = catalog("two", V2)
        assert two.exists("sft_model")
        assert verify(two.load("sft_model")) == verify(finished)
    assert "'secret'" not in f"{caplog.text} {two['sft_model']} {two['store']}"
    assert StoreDataset(url=None).load() is None


def test_versions_of_other_machines_are_outlines_until_they_are_loaded(shared, finished, tmp_path):
    for version in (V2, V1):
        shared("one", version).save(finished)
    elsewhere = shared("two", "v")
    found = elsewhere.versions()
    assert [path.parent.name for path in found] == [V1, V2]
    names = {path.relative_to(found[0]).as_posix() for path in found[0].rglob("*")}
    assert names == {"manifest.json", "report.json", "sub"}
    assert elsewhere.whole(tmp_path) == tmp_path
    assert (elsewhere.whole(found[0] / "sub") / "more").read_text() == "d"
    newest = elsewhere.load()
    assert newest.parent.name == V2
    first = shared("two", "v", load=V1).load()
    assert first.parent.name == V1
    assert (first / "weights").samefile(newest / "weights")  # not downloaded twice
    verify(elsewhere.versions()[0])
    assert elsewhere.abandoned() == []


def test_an_upload_that_fails_publishes_nothing(shared, finished, tmp_path, monkeypatch):
    def fail(*arguments):
        raise StageError("gone")

    with monkeypatch.context() as broken:
        broken.setattr(Store, "write", fail)
        with pytest.raises(DatasetError) as error:
            shared("one").save(finished)
    assert isinstance(error.value.__cause__, StageError)
    assert not list((tmp_path / "one").rglob("weights"))
    assert shared("one").versions() == []


def test_one_damaged_manifest_does_not_hide_the_other_versions(shared, finished, tmp_path, caplog):
    for version in (V1, V2):
        shared("one", version).save(finished)
    pointer = tmp_path / "store" / "versions" / "sft_model" / f"{V1}.json"
    pointer.write_text(pointer.read_text()[:100])
    elsewhere = shared("two", "v")
    assert [path.parent.name for path in elsewhere.versions()] == [V2]
    (warning,) = caplog.messages
    assert warning.startswith(f"a version is left out: {pointer} is damag")
    assert warning.endswith("Fix: restore or remove it in the store")
    with pytest.raises(ArtifactError):  # `clean` has to know what it needs
        elsewhere.versions(strict=True)
    here = shared("one", "v").versions()  # was published from here
    assert [path.parent.name for path in here] == [V1, V2]


def test_a_disk_that_fills_up_during_a_download_is_named(shared, finished, tmp_path, disk):
    """As by another program, after the space was found to be enough."""
    shared("one").save(finished)
    mine = dataset(disk.path, store=str(tmp_path / "store"))
    filling = patch.object(store, "require_space", lambda *_: disk.leave(0))
    with filling, pytest.raises(DatasetError) as error:
        mine.load()
    assert isinstance(error.value.__cause__, StageError)
    assert not isinstance(error.value.__cause__, StoreError)
    assert f"{V1}.json is not copied: [Errno 28] No space left" in str(error.value.__cause__)


def test_a_url_as_filepath_is_refused():
    with pytest.raises(DatasetError, match=r"s3://bucket/x: found a URL .*Fix: set `filepath`"):
        ArtifactDataset(filepath="s3://bucket/x", version=Version(None, None))
