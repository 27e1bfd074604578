"""Artifacts in the catalog: published completely or not, and read back."""

import os
import re
from urllib.parse import quote

import pytest
from kedro.io import DataCatalog, Version
from kedro.io.core import DatasetError

from rlhf_pipeline.datasets import artifact
from rlhf_pipeline.datasets.artifact import ArtifactDataset, PageDataset, StoreDataset
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.manifest import Manifest, file_entries, verify
from rlhf_pipeline.stages.processes import this_process

V1, V2 = "2026-01-01T00.00.00.000Z", "2026-01-02T00.00.00.000Z"


def seal(folder, **metrics):
    Manifest("sft", "f", 1, {}, {}, {}, metrics, file_entries(folder)).write(folder)


@pytest.fixture
def finished(tmp_path):
    folder = tmp_path / "export"
    (folder / "sub").mkdir(parents=True)
    for name in ("weights", "report.json", "sub/more"):
        (folder / name).write_text(name)
    seal(folder)
    return folder


def dataset(tmp_path, save=V1):
    path = tmp_path / "models" / "sft_model"
    return ArtifactDataset(filepath=str(path), version=Version(None, save))


def test_publishing_links_and_copies_nothing(finished, tmp_path):
    catalog = dataset(tmp_path, V1)
    catalog.save(finished)
    published = catalog.load()
    assert published == tmp_path / "models" / "sft_model" / V1 / "sft_model"
    assert (published / "sub" / "more").samefile(finished / "sub" / "more")


def test_latest_refers_to_the_newest_version_and_is_no_version_itself(finished, tmp_path):
    mine = dataset(tmp_path, V1)
    mine.save(finished)
    dataset(tmp_path, V2).save(finished)
    assert mine.load().parent.name == V1, "a run reads its own version"
    latest = tmp_path / "models" / "sft_model" / "latest"
    assert latest.resolve() == dataset(tmp_path, "v").load()
    assert str(latest.readlink()) == f"{V2}/sft_model"
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


def test_a_version_later_than_now_is_a_fault(finished, tmp_path):
    for version in (V1, "2931-01-01T00.00.00.000Z"):
        assert dataset(tmp_path, "v").clock_fault() is None
        dataset(tmp_path, version).save(finished)
    assert dataset(tmp_path, "v").clock_fault() == (
        f"{tmp_path}/models/sft_model: found version {version}, expected none later than now. "
        "Fix: correct the clock, or rename it"
    )


def test_a_full_disk_leaves_no_version_and_takes_no_space(finished, disk):
    """On another disk than the work directory, so files are copied."""
    (finished / "large").write_bytes(bytes(2**20))
    seal(finished)
    disk.leave(2**19)
    with pytest.raises(DatasetError) as caught:
        dataset(disk.path, V1).save(finished)
    assert isinstance(caught.value.__cause__, StageError)
    message = str(caught.value)
    assert re.search("stage sft is finished in .*/export but not published as .*/sft_m", message)
    assert "[Errno 28] No space left on device: " in message
    assert "  space    0.5 of 8.0 MiB are free on the file system of " in message
    assert dataset(disk.path, V2).versions() == []
    disk.make_room()
    catalog = dataset(disk.path, V2)
    catalog.save(finished)
    verify(catalog.load())


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
    seal(finished, **{"win_rate/gold": 0.75, "kl/policy": 12.34567})
    catalog = dataset(tmp_path, V1)
    catalog.save(finished)
    assert catalog.preview() == {
        "index": [0, 1],
        "columns": ["metric", "value"],
        "data": [["kl/policy", "12.35"], ["win_rate/gold", "0.75"]],
    }


def test_the_entry_of_the_store_takes_credentials_and_shows_none(bucket, s3_server, monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    keys = {"key": "access", "secret": "secret", "client_kwargs": {"endpoint_url": s3_server[0]}}
    kind = "rlhf_pipeline.datasets.artifact.StoreDataset"
    entry = {"type": kind, "url": "s3://bucket/models", "credentials": "s3"}
    catalog = DataCatalog.from_config({"store": entry}, {"s3": keys})
    catalog.load("store").check()
    assert "'secret'" not in str(catalog["store"])
    assert StoreDataset(url=None).load() is None


def test_a_url_as_filepath_is_refused():
    with pytest.raises(DatasetError, match=r"s3://bucket/x: found a URL .*Fix: set `filepath`"):
        ArtifactDataset(filepath="s3://bucket/x", version=Version(None, None))
