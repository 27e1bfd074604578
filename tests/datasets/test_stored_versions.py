"""Catalog entries in a store: published whole or not at all, listed there, copied here."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
from kedro.io import DataCatalog, Version
from kedro.io.core import DatasetError

from rlhf_pipeline.datasets import artifact as module
from rlhf_pipeline.datasets.artifact import ArtifactDataset, PageDataset
from rlhf_pipeline.datasets.store import StoreDataset
from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.runtime.manifest import Manifest, file_entries, verify
from rlhf_pipeline.storage import store
from rlhf_pipeline.storage.files import StoreError

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


def dataset(url, cache, save=V1, load=None, kind=ArtifactDataset, **options):
    return kind(filepath=url, version=Version(load, save), cache=str(cache), **options)


@pytest.fixture
def url(tmp_path):
    """A folder that is used as a store."""
    return f"local://{tmp_path}/store/sft_model"


def test_a_version_on_s3_is_read_on_another_machine_with_kedros_credentials(
    bucket, s3_server, finished, tmp_path, monkeypatch
):
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    entry = {
        "type": "rlhf_pipeline.datasets.artifact.ArtifactDataset",
        "filepath": "s3://bucket/models/sft_model",
        "versioned": True,
        "credentials": "s3",
    }
    keys = {"key": "access", "secret": "secret", "client_kwargs": {"endpoint_url": s3_server[0]}}

    def catalog(cache, version):
        config = {"sft_model": entry | {"cache": str(tmp_path / cache)}}
        return DataCatalog.from_config(config, {"s3": keys}, save_version=version)

    one = catalog("one", V1)
    assert not one.exists("sft_model")
    one.save("sft_model", finished)
    assert one.load("sft_model") == (
        tmp_path / "one" / "s3" / "bucket" / "models" / "sft_model" / V1 / "sft_model"
    )
    assert (one.load("sft_model") / "weights").samefile(finished / "weights")
    stored = {
        path.relative_to(bucket / "models" / "sft_model").as_posix()
        for path in (bucket / "models").rglob("*")
        if path.is_file() and path.parent.name != "objects"
    }
    assert stored == {f"{V1}/sft_model/manifest.json"}
    two = catalog("two", V2)
    assert two.exists("sft_model")
    assert verify(two.load("sft_model")) == verify(finished)
    assert "secret" not in str(two["sft_model"])


def test_versions_are_those_of_the_store_and_outlines_until_they_are_loaded(
    url, finished, tmp_path
):
    for version in (V2, V1):
        dataset(url, tmp_path / "one", version).save(finished)
    elsewhere = dataset(url, tmp_path / "two", "v")
    found = elsewhere.versions()
    assert [path.parent.name for path in found] == [V1, V2]
    names = {path.relative_to(found[0]).as_posix() for path in found[0].rglob("*")}
    assert names == {"manifest.json", "report.json", "sub"}
    assert elsewhere.whole(tmp_path) == tmp_path
    assert (elsewhere.whole(found[0] / "sub") / "more").read_text() == "d"
    assert elsewhere.load().parent.name == V2
    assert dataset(url, tmp_path / "two", "v", load=V1).load().parent.name == V1
    verify(elsewhere.versions()[0])
    assert elsewhere.abandoned() == []


def test_a_file_of_another_version_is_linked(url, finished, tmp_path):
    for version in (V1, V2):
        dataset(url, tmp_path / "one", version).save(finished)
    first = dataset(url, tmp_path / "two", "v", load=V1).load()
    second = dataset(url, tmp_path / "two", "v", load=V2).load()
    assert (first / "weights").samefile(second / "weights")


def test_an_upload_that_fails_publishes_nothing(url, finished, tmp_path, monkeypatch):
    def fail(*arguments):
        raise StageError("gone")

    with monkeypatch.context() as patch:
        patch.setattr("rlhf_pipeline.storage.store.Store.write", fail)
        with pytest.raises(DatasetError) as error:
            dataset(url, tmp_path / "one").save(finished)
    assert isinstance(error.value.__cause__, StageError)
    assert not list((tmp_path / "one").rglob("weights"))
    assert dataset(url, tmp_path / "one").versions() == []


def test_one_damaged_manifest_does_not_hide_the_other_versions(url, finished, tmp_path, caplog):
    for version in (V1, V2):
        dataset(url, tmp_path / "one", version).save(finished)
    pointer = tmp_path / "store" / "sft_model" / V1 / "sft_model" / "manifest.json"
    pointer.write_text(pointer.read_text()[:100])
    elsewhere = dataset(url, tmp_path / "two", "v")
    assert [path.parent.name for path in elsewhere.versions()] == [V2]
    (warning,) = caplog.messages
    assert warning.startswith(f"a version is left out: {url}/{V1}/sft_model/manifest.json is damag")
    assert warning.endswith("Fix: restore or remove it in the store")
    with pytest.raises(ArtifactError):  # `clean` has to know what it needs
        elsewhere.versions(strict=True)
    here = dataset(url, tmp_path / "one", "v").versions()  # was published from here
    assert [path.parent.name for path in here] == [V1, V2]


def test_damage_in_the_store_is_found_when_the_version_is_loaded(url, finished, tmp_path):
    dataset(url, tmp_path / "one").save(finished)
    for path in (tmp_path / "store").rglob("objects/*"):
        path.write_text(path.read_text().replace("abc", "abd"))
    with pytest.raises(DatasetError) as error:
        dataset(url, tmp_path / "two").load()
    assert isinstance(error.value.__cause__, ArtifactError)
    assert "(weights): found other bytes" in str(error.value.__cause__)


def test_a_disk_that_fills_up_during_a_download_is_named(url, finished, tmp_path, disk):
    """As by another program, after the space was found to be enough."""
    dataset(url, tmp_path / "one").save(finished)
    mine = dataset(url, disk.path / "two")
    (disk.path / "two").mkdir()
    filling = patch.object(store, "require_space", lambda *_: disk.leave(0))
    with filling, pytest.raises(DatasetError) as error:
        mine.load()
    assert isinstance(error.value.__cause__, StageError)
    assert not isinstance(error.value.__cause__, StoreError)
    assert "manifest.json is not copied: [Errno 28] No space left" in str(error.value.__cause__)


def test_a_page_is_a_file_in_the_store(tmp_path):
    url = f"local://{tmp_path}/store/evaluation.html"
    dataset(url, tmp_path / "one", kind=PageDataset).save("<p>é</p>")
    written = tmp_path / "store" / "evaluation.html" / V1 / "evaluation.html"
    assert written.read_text(encoding="utf-8") == "<p>é</p>"
    page = dataset(url, tmp_path / "two", kind=PageDataset)
    assert page.load().read_text(encoding="utf-8") == "<p>é</p>"
    assert page.versions() == [page.load()]


@pytest.mark.parametrize("kind", [ArtifactDataset, PageDataset])
def test_several_readers_may_load_a_version_at_the_same_time(finished, tmp_path, kind):
    url = f"local://{tmp_path}/store/thing"
    dataset(url, tmp_path / "one", kind=kind).save(finished if kind == ArtifactDataset else "<p>")
    readers = [dataset(url, tmp_path / "two", V2, kind=kind) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        loaded = set(pool.map(lambda reader: reader.load(), readers * 100))
    assert loaded == {tmp_path / "two" / "local" / str(tmp_path)[1:] / f"store/thing/{V1}/thing"}
    assert [path.parent.name for path in readers[0].versions()] == [V1]


def test_a_url_needs_versions(tmp_path):
    with pytest.raises(DatasetError, match="s3://bucket/x: found no `versioned: true`"):
        ArtifactDataset(filepath="s3://bucket/x")


def test_the_cache_is_that_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert module._cache_folder() == tmp_path / "rlhf-pipeline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert module._cache_folder() == Path("/home/me/.cache/rlhf-pipeline")


def test_the_entry_of_the_store_shows_no_key(tmp_path, caplog):
    config = {
        "store": {
            "type": "rlhf_pipeline.datasets.store.StoreDataset",
            "url": "s3://bucket/project",
            "credentials": "s3",
        }
    }
    with caplog.at_level(logging.DEBUG):
        catalog = DataCatalog.from_config(config, {"s3": {"key": "a", "secret": "canary"}})
        assert catalog.load("store").url == "s3://bucket/project"
    assert "canary" not in caplog.text + str(catalog["store"])
    assert StoreDataset(url=None).load() is None
