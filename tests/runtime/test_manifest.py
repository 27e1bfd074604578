"""Manifests: an artifact is identified and checked by its content, whose digests are made once."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_pipeline.errors import ArtifactError, ForeignFileError
from rlhf_pipeline.runtime import heartbeat, manifest
from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.runtime.manifest import FileEntry, Manifest, content_digest, verify

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
"""printf abc | sha256sum"""


def make_artifact(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    entries = manifest.file_entries(directory)
    Manifest("sft", "f" * 64, 1, {}, {}, {}, {"loss": 0.5}, entries).write(directory)
    return directory


def test_equal_content_of_an_artifact_or_a_part_has_equal_digests_in_any_folder(tmp_path):
    one = make_artifact(tmp_path / "one", weights="abc", sub__more="d")
    other = make_artifact(tmp_path / "elsewhere" / "other", weights="abc", sub__more="d")
    changed = make_artifact(tmp_path / "changed", weights="abd", sub__more="d")
    assert content_digest(one) == content_digest(other)
    assert content_digest(one) != content_digest(changed)
    assert content_digest(one / "sub") == content_digest(changed / "sub")


def test_the_metrics_of_a_training_are_checked_but_do_not_count_as_content(tmp_path):
    """They contain times: two equal trainings would have different content."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, curves in ((one, "1 s"), (other, "2 s")):
        folder.mkdir()
        (folder / manifest.CURVES).write_text(curves)
        make_artifact(folder, weights="abc")
    assert content_digest(one) == content_digest(other)
    (other / manifest.CURVES).write_text("3 s")
    with pytest.raises(ArtifactError, match=r"metrics\.jsonl was changed"):
        verify(other)


@pytest.mark.parametrize("beside", [None, '{"files": ["pairs.jsonl"]}', "[1, 2]", "pairs.jsonl 12"])
def test_a_plain_file_is_digested_by_its_bytes(tmp_path, beside):
    """Also next to a manifest of another program."""
    if beside is not None:
        (tmp_path / "manifest.json").write_text(beside)
    (tmp_path / "file").write_bytes(b"abc")
    assert content_digest(tmp_path / "file") == manifest.file_digest(tmp_path / "file") == ABC


def test_a_foreign_manifest_does_not_make_an_artifact(tmp_path):
    (tmp_path / "manifest.json").write_text('{"files": ["model.safetensors"]}')
    (tmp_path / "model").mkdir()
    assert manifest.artifact_of(tmp_path / "model") is None
    artifact = make_artifact(tmp_path / "model" / "a", sub__weights="abc")
    assert manifest.artifact_of(artifact / "sub") == artifact
    with pytest.raises(ArtifactError, match="neither a file nor part of a finished artifact"):
        content_digest(tmp_path / "model")


@pytest.mark.parametrize(
    ("read", "path", "message"),
    [
        (content_digest, "nothing", "neither a file nor part of a finished artifact"),
        (content_digest, "a/sft", r"is empty: .* with parameters that create it"),
        (Manifest.read, "", r"not a finished artifact: it has no manifest\.json"),
    ],
)
def test_a_path_that_is_not_an_artifact_is_reported(tmp_path, read, path, message):
    make_artifact(tmp_path / "a", weights="abc")
    with pytest.raises(ArtifactError, match=message):
        read(tmp_path / path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (None, "{", ""),
        (None, "", ""),
        (None, "null", ""),
        (None, '{"stage": "sft", "files": []}', ""),
        ("0.5", "0.6", r" \(its digest does not match\)"),
        ('"ffff', '"efff', r" \(its digest does not match\)"),
        ('"sft"', '"ppo"', r" \(its digest does not match\)"),
    ],
)
def test_a_damaged_or_changed_manifest_is_reported(tmp_path, old, new, message):
    """Another fingerprint or other metrics are valid JSON, and every file is unchanged."""
    artifact = make_artifact(tmp_path / "a", weights="abc")
    text = (artifact / "manifest.json").read_text()
    assert old is None or text.count(old) == 1
    (artifact / "manifest.json").write_text(new if old is None else text.replace(old, new))
    with pytest.raises(ArtifactError, match=rf"manifest\.json is damaged{message}"):
        verify(artifact)


def test_a_manifest_of_another_version_is_read_and_verified(tmp_path):
    """Written by 1.0.0, with a field that has left since."""
    (tmp_path / "weights").write_text("abc")
    fields = {
        "stage": "sft", "fingerprint": "f" * 64, "seed": 7, "config": {}, "inputs": {},
        "versions": {}, "metrics": {"validation/loss": 0.5}, "adjusted": {"sft.batch_size": 8},
        "files": {"weights": {"size": 3, "sha256": ABC}},
    }  # fmt: skip
    fields["digest"] = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    (tmp_path / "manifest.json").write_text(json.dumps(fields))
    found = verify(tmp_path)
    assert (found.seed, found.metrics, found.ranks) == (7, {"validation/loss": 0.5}, 1)


def test_a_flipped_bit_or_a_missing_file_is_found(tmp_path):
    """An artifact may be reached by a link."""
    artifact = make_artifact(tmp_path / "a", weights="abc", sub__more="d")
    (tmp_path / "link").symlink_to(artifact)
    assert verify(tmp_path / "link").metrics == {"loss": 0.5}
    (artifact / "weights").write_text("abb")
    with pytest.raises(ArtifactError, match=r"weights was changed after stage sft finished"):
        verify(artifact)
    (artifact / "weights").unlink()
    with pytest.raises(ArtifactError, match=r"weights is missing"):
        verify(artifact)


def test_an_added_file_is_found_unless_nothing_loads_it(tmp_path):
    artifact = make_artifact(tmp_path / "a", weights="abc", sub__more="d")
    (artifact / "registered_model_meta").touch()  # added by MLflow when it loads the model
    (artifact / ".DS_Store").touch()
    (artifact / "sub" / ".cache").mkdir()
    (artifact / "sub" / ".cache" / "index").touch()
    verify(artifact)
    (artifact / "sub" / "manifest.json").touch()
    with pytest.raises(ForeignFileError, match=r"sub/manifest\.json was added after stage sft"):
        verify(artifact)


def test_a_file_outside_the_artifact_is_reported(tmp_path):
    artifact = make_artifact(tmp_path / "a", weights="abc")
    (artifact / "weights").rename(tmp_path / "weights")
    (artifact / "weights").symlink_to(tmp_path / "weights")
    message = r"a/weights is outside its artifact, at .*/weights\. Fix: replace the link"
    with pytest.raises(ArtifactError, match=message):
        verify(artifact)
    (artifact / "weights").unlink()
    found = Manifest.read(artifact)
    replace(found, files={"../weights": found.files["weights"]}).write(artifact)
    with pytest.raises(ArtifactError, match=r"a/manifest\.json is damaged .*outside its"):
        verify(artifact)


ENTRY = FileEntry(8, "9c56cc51b374c3ba189210d5b6d4bf57790d351c96c47c02190ecf1e430635ab")
"""printf abcdefgh | sha256sum"""


@pytest.fixture
def pieces_of_four(monkeypatch):
    """A file of four bytes is large."""
    monkeypatch.setattr(manifest, "PIECE", 4)
    monkeypatch.setattr(heartbeat, "_here", Heartbeat(0, None))


@pytest.fixture
def reads(monkeypatch):
    """The names of the files that are read for their digest."""
    found, read = [], manifest.file_digest

    def count(path):
        found.append(path.name)
        return read(path)

    monkeypatch.setattr(manifest, "file_digest", count)
    return found


def test_a_written_file_has_the_digest_of_its_bytes_and_is_not_read(
    tmp_path, pieces_of_four, reads
):
    """Every piece is a heartbeat."""
    assert manifest.write_pieces(tmp_path / "file", [b"abc", memoryview(b"defgh")]) == ENTRY
    assert reads == [] and heartbeat._here.pieces == 2
    assert list(manifest.read_pieces(tmp_path / "file")) == [b"abcd", b"efgh"]
    assert manifest.file_digest(tmp_path / "file") == ENTRY.sha256
    assert heartbeat._here.pieces == 4


def test_a_large_file_is_not_read_again_under_any_name(tmp_path, pieces_of_four, reads):
    manifest.write_pieces(tmp_path / "written", [b"abcdefgh"])
    (tmp_path / "written").rename(tmp_path / "renamed")
    assert FileEntry.of(tmp_path / "renamed") == ENTRY
    assert reads == []
    (tmp_path / "other").write_bytes(b"abcdefgh")
    for _ in range(2):
        assert FileEntry.of(tmp_path / "other") == ENTRY
    assert reads == ["other"]
    assert ENTRY.matches(tmp_path / "other")  # a check always reads
    assert reads == ["other"] * 2


@pytest.mark.parametrize("is_large", [True, False])
def test_a_changed_file_is_read_again(tmp_path, monkeypatch, reads, is_large):
    """A small one may change twice within a tick of the clock."""
    monkeypatch.setattr(manifest, "PIECE", 4 if is_large else 99)
    manifest.write_pieces(tmp_path / "file", [b"abcdefgh"])
    written = (tmp_path / "file").stat().st_mtime_ns
    (tmp_path / "file").write_bytes(b"abcdefgi")
    os.utime(tmp_path / "file", ns=(written, written + is_large))
    assert FileEntry.of(tmp_path / "file").sha256 == hashlib.sha256(b"abcdefgi").hexdigest()
    assert reads == ["file"]
