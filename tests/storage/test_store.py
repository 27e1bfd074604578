"""A store, also on a real S3 server: whole or not at all, verified, resumed after a cut."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from ports import reserved_port
from s3_fixtures import serve_s3, store_at
from waiting import once

from rlhf_pipeline.errors import ArtifactError, ConfigError, StageError
from rlhf_pipeline.runtime.digests import FileEntry
from rlhf_pipeline.runtime.manifest import Manifest, file_entries, verify
from rlhf_pipeline.stages.store import Store, open_store, upload

# printf abc | sha256sum; printf d | sha256sum
ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
D = "18ac3e7343f016890c510e93f935261169d9e3f565436429830faf0934f4f8e4"


def seal(folder):
    """Make a folder an artifact."""
    Manifest("sft", "f" * 64, 1, {}, {}, {}, {}, file_entries(folder)).write(folder)
    return folder


@pytest.fixture
def artifact(tmp_path):
    """Two names of one content, and another content in a subfolder."""
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_text("abc")
    (folder / "copy").write_text("abc")
    (folder / "sub" / "more").write_text("d")
    return seal(folder)


def uploads(folder):
    """When each object of a store was uploaded, by its digest."""
    return {path.name: path.stat().st_ctime_ns for path in (folder / "objects").iterdir()}


def test_each_content_is_stored_once_and_pulled_by_its_digest(bucket, artifact, tmp_path):
    store = Store("s3://bucket/once")
    store.push(artifact, "folders/it.json")
    uploaded = uploads(bucket / "once")
    objects = {path.name: path.read_text() for path in (bucket / "once" / "objects").iterdir()}
    assert objects == {ABC: "abc", D: "d"}
    pointer = bucket / "once" / "folders" / "it.json"
    assert pointer.read_bytes() == (artifact / "manifest.json").read_bytes()
    store.push(artifact, "folders/again.json")
    assert uploads(bucket / "once") == uploaded
    pointers = ["folders/again.json", "folders/it.json"]
    assert store.names() == [*pointers, f"objects/{D}", f"objects/{ABC}"]
    assert store.below("none").names() == []
    store.pull(store.manifest("folders/it.json"), tmp_path / "here")
    assert (tmp_path / "here" / "sub" / "more").read_text() == "d"
    assert verify(tmp_path / "here") == verify(artifact)
    assert store.manifest("folders/none.json") is None


def test_a_flipped_byte_in_the_store_is_named_and_the_next_push_mends_it(
    bucket, artifact, tmp_path
):
    store = Store("s3://bucket/flipped")
    store.push(artifact, "it.json")
    (bucket / "flipped" / "objects" / ABC).write_text("abd")
    with pytest.raises(ArtifactError) as error:
        store.pull(store.manifest("it.json"), tmp_path / "here")
    assert str(error.value) == (
        f"s3://bucket/flipped/objects/{ABC} (copy): found 3 bytes with the SHA-256 "
        "a52d159f262b, expected 3 bytes with the SHA-256 in its name. Fix: restore it in the store"
    )
    assert not (tmp_path / "here").exists()
    before = uploads(bucket / "flipped")
    store.push(artifact, "it.json")
    assert uploads(bucket / "flipped")[D] == before[D]
    store.pull(store.manifest("it.json"), tmp_path / "here")
    assert (tmp_path / "here" / "weights").read_text() == "abc"
    pointer = bucket / "flipped" / "it.json"
    pointer.write_text(pointer.read_text().replace('"seed": 1', '"seed": 2'))
    with pytest.raises(ArtifactError, match=r"flipped/it\.json is damaged\. Fix:"):
        store.manifest("it.json")
    store.remove(["gone", "it.json"])  # another machine has removed one of them
    assert store.manifest("it.json") is None


def cut(path):
    path.write_text("e")


@pytest.mark.parametrize(("damage", "found"), [(Path.unlink, 0), (cut, 1)])
def test_a_lost_or_cut_object_is_named_and_the_next_push_mends_it(
    artifact, tmp_path, damage, found
):
    store = Store(str(tmp_path / "store"))
    store.push(artifact, "it.json")
    damage(tmp_path / "store" / "objects" / ABC)
    with pytest.raises(ArtifactError, match=rf"{ABC} \(copy\): found {found} bytes .* 3 bytes"):
        store.pull(store.manifest("it.json"), tmp_path / "here")
    before = uploads(tmp_path / "store")
    Store(str(tmp_path / "store")).push(artifact, "it.json")
    assert uploads(tmp_path / "store")[D] == before[D]
    store.pull(store.manifest("it.json"), tmp_path / "here")
    assert verify(tmp_path / "here") == verify(artifact)


def test_a_checksum_that_the_stores_client_finds_wrong_counts_as_damage(
    artifact, tmp_path, monkeypatch
):
    class FlexibleChecksumError(Exception):
        """As of botocore."""

    def fail(*arguments, **options):
        raise FlexibleChecksumError

    store = Store(str(tmp_path / "store"))
    store.push(artifact, "it.json")
    manifest = store.manifest("it.json")
    monkeypatch.setattr(LocalFileSystem, "open", fail)
    with pytest.raises(ArtifactError, match="found 0 bytes"):
        store.pull(manifest, tmp_path / "here")


def test_a_pointer_is_replaced_whole_or_not_at_all(artifact, tmp_path, monkeypatch):
    """A kill or a full disk during the write leaves the earlier one."""
    store = Store(str(tmp_path / "store"))
    store.push(artifact, "it.json")

    def cut_off(self, path, value, **options):
        Path(path).write_bytes(value[:100])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "pipe_file", cut_off)
        with pytest.raises(StageError, match="No space left"):
            store.write("it.json", "x" * 1000)
    assert store.manifest("it.json") == verify(artifact)
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["it.json", "objects"]


def test_an_upload_that_a_killed_server_cut_off_sends_only_the_rest(tmp_path, monkeypatch):
    source, served = tmp_path / "source", tmp_path / "served"
    source.mkdir()
    for name, size in (("a", 1_000_000), ("b", 60_000_000), ("c", 1000)):
        (source / name).write_bytes(os.urandom(size))
    (served / "bucket").mkdir(parents=True)
    files = Manifest.read(seal(source)).files
    first = served / "bucket" / "x" / "objects" / files["a"].sha256
    with reserved_port() as port:
        store = store_at(port)
        server = serve_s3(served, port)
        with once(first.exists, server.kill), pytest.raises(StageError, match="s3://bucket/x: "):
            store.push(source, "it.json")
        server.communicate()
        assert {path.name for path in first.parent.iterdir()} == {files["a"].sha256}
        server = serve_s3(served, port)
        try:
            assert store.manifest("it.json") is None
            uploaded = first.stat().st_ctime_ns
            store.push(source, "it.json")
            assert first.stat().st_ctime_ns == uploaded
            store.pull(store.manifest("it.json"), tmp_path / "here")
        finally:
            server.kill()
            server.communicate()
    assert verify(tmp_path / "here") == verify(source)


class Slow(Store):
    """A store with half of a file here when the other reader begins, until that one is done."""

    def __init__(self, url, half, other):
        super().__init__(url)
        self.half, self.other = half, other

    def _download(self, entry, path, name):
        path.write_text("half")
        self.half.set()
        self.other.wait(1)  # longer than the other one takes, unless it waits for this one
        super()._download(entry, path, name)


def test_two_readers_of_one_artifact_do_not_disturb_each_other(artifact, tmp_path):
    store, half, other = Store(str(tmp_path / "store")), Event(), Event()
    store.push(artifact, "it.json")
    slow = Slow(store.url, half, other)
    here = tmp_path / "cache" / "version" / "here"
    with ThreadPoolExecutor() as pool:
        first = pool.submit(slow.pull, store.manifest("it.json"), here)
        assert half.wait(60)
        store.pull(store.manifest("it.json"), here)
        other.set()
        first.result()
    assert verify(here) == verify(artifact)
    assert [path for path in here.parent.iterdir() if path.is_dir()] == [here]


def cut_off(store, pointer, folder, lost):
    """Download an artifact until an object that the store has lost; return the partial folder."""
    (Path(store.url) / "objects" / lost).unlink()
    with pytest.raises(ArtifactError, match=f"{lost} .*: found 0 bytes"):
        store.pull(store.manifest(pointer), folder)
    return folder.with_name("here.partial")


def test_a_download_that_was_cut_off_keeps_its_files(artifact, tmp_path):
    store, here = Store(str(tmp_path / "store")), tmp_path / "here"
    store.push(artifact, "it.json")
    partial = cut_off(store, "it.json", here, D)
    os.utime(partial / "copy", (1000, 1000))
    (partial / "weights").write_text("ab")
    store.push(artifact, "it.json")
    store.pull(store.manifest("it.json"), here)
    assert (here / "copy").stat().st_mtime == 1000
    assert verify(here) == verify(artifact)
    assert not partial.exists()


def test_a_download_that_was_cut_off_leaves_nothing_to_another_artifact(artifact, tmp_path):
    """As of the checkpoint of an earlier step."""
    store, other = Store(str(tmp_path / "store")), tmp_path / "other"
    other.mkdir()
    (other / "first").write_text("1")
    (other / "more").write_text("d")
    store.push(seal(other), "other.json")
    assert (cut_off(store, "other.json", tmp_path / "here", D) / "first").is_file()
    store.push(artifact, "it.json")
    store.pull(store.manifest("it.json"), tmp_path / "here")
    found = {path.relative_to(tmp_path / "here") for path in (tmp_path / "here").rglob("*")}
    assert found == {path.relative_to(artifact) for path in artifact.rglob("*")}


def test_an_artifact_that_is_here_is_not_downloaded_again(artifact, tmp_path):
    store, here = Store(str(tmp_path / "store")), tmp_path / "here"
    store.push(artifact, "it.json")
    store.pull(store.manifest("it.json"), here)
    os.utime(here / "weights", (1000, 1000))
    store.pull(store.manifest("it.json"), here)
    assert (here / "weights").stat().st_mtime == 1000


def test_without_weights_a_copy_has_manifest_folders_and_json_files(artifact, tmp_path):
    (artifact / "report.json").write_text("{}")
    store = Store(str(tmp_path / "store"))
    store.push(seal(artifact), "it.json")
    store.pull(store.manifest("it.json"), tmp_path / "here", without_weights=True)
    found = {path.relative_to(tmp_path / "here").as_posix() for path in tmp_path.rglob("here/**/*")}
    assert found == {"manifest.json", "report.json", "sub"}


@pytest.mark.parametrize(
    ("name", "digest"), [("../outside", ABC), ("/tmp/outside", ABC), ("x", "../it.json")]
)
def test_a_name_outside_the_folder_is_refused(artifact, tmp_path, name, digest):
    store = Store(str(tmp_path / "store"))
    files = {name: FileEntry(3, digest)}
    Manifest("sft", "f" * 64, 1, {}, {}, {}, {}, files).write(tmp_path)
    store.write("it.json", (tmp_path / "manifest.json").read_text())
    with pytest.raises(ArtifactError, match=r"store/it\.json is damaged"):
        store.pull(store.manifest("it.json"), tmp_path / "here")


def test_a_store_that_cannot_be_used_is_explained_before_anything_is_uploaded(bucket, s3_server):
    Store("s3://bucket/fine").check()
    assert not [path for path in bucket.rglob("fine/**/*") if path.is_file()]
    with pytest.raises(StageError) as missing:
        Store("s3://nowhere/x").check()
    assert str(missing.value).startswith("s3://nowhere/x: not found (NoSuchBucket: ")
    with pytest.raises(StageError, match=r"s3://bucket/x: access denied \(.*signature") as it:
        Store("s3://bucket/x", key="access", secret="canary-secret").check()
    assert "canary" not in str(it.value)
    with pytest.raises(StageError, match=r"\(ValueError: .*nothing\)\. Fix: check the path"):
        Store("nothing://x").check()


def test_a_secret_in_the_url_of_a_store_is_refused():
    with pytest.raises(ConfigError) as error:
        Store("s3://me:canary@bucket/x").check()
    assert str(error.value) == (
        "s3://...@bucket/x: found a user, a password or a query, expected none. Fix: set them as "
        "`credentials` of the catalog entry, or in the environment"
    )


def test_a_path_is_taken_literally(tmp_path):
    store, root = open_store(str(tmp_path / "a::b [c]*"))
    assert isinstance(store, LocalFileSystem) and root == str(tmp_path / "a::b [c]*")
    fsspec.filesystem("memory").pipe("/exported/x", b"1")
    store, root = open_store("memory://exported/")
    assert (store.find(root), root) == (["/exported/x"], "/exported")


class Forgetful(LocalFileSystem):
    """A store that damages every file."""

    def put_file(self, local, remote, **options):
        Path(remote).write_text("2!")


def test_bytes_that_arrive_damaged_do_not_stay(tmp_path):
    (tmp_path / "weights").write_text("abc")
    with pytest.raises(StageError, match=r"x: found SHA-256 .* expected ba7816bf8f01"):
        upload(Forgetful(), tmp_path / "weights", str(tmp_path / "x"), ABC)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("root", ["one [store]", "file://{folder}/two"])
def test_a_local_folder_is_a_store(artifact, tmp_path, root):
    store = Store(root.format(folder=tmp_path) if "://" in root else str(tmp_path / root))
    store.check()
    store.push(artifact, "a/it.json")
    assert store.names()[0] == "a/it.json"
    store.pull(store.manifest("a/it.json"), tmp_path / "here")
    assert verify(tmp_path / "here") == verify(artifact)
