"""The statement of an export: no file of the folder can change without notice."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from rlhf_pipeline.commands.passport import (
    SIGNATURE,
    STATEMENT,
    SUMS,
    check,
    sign,
    statement,
)
from rlhf_pipeline.errors import ArtifactError, ConfigError
from rlhf_pipeline.kedro_run.artifacts import Policy
from rlhf_pipeline.runtime.certificates import Certificate
from rlhf_pipeline.runtime.manifest import Manifest, file_entries

FILES = {
    "model.safetensors": "weights",
    "config.json": "{}",
    "tokenizer.json": "[]",
    "README.md": "the card",
}
CONFIG = {
    "base_model": {"path": "/home/someone/model"},
    "split": {"sources": [{"path": "/home/someone/rows.jsonl"}]},
}


def finished(folder):
    """Write the digests, as the last step of an export does."""
    entries = {name: one for name, one in file_entries(folder).items() if name != SUMS}
    (folder / SUMS).write_text("".join(f"{one.sha256}  {name}\n" for name, one in entries.items()))


@pytest.fixture
def export(tmp_path):
    def make(name, key=None, **files):
        folder = tmp_path / name
        folder.mkdir()
        for file, text in (FILES | files).items():
            (folder / file).write_text(text)
        made = Manifest("ppo", "f" * 64, 7, CONFIG, {"sft_model": "a" * 64}, {"torch": "2"}, {}, {})
        policy = Policy("champion", "ppo", {"ppo": made}, ())
        proofs = {"ppo": Certificate("ppo", "k" * 64, {}, 2, "AMD EPYC", 7, {})}
        proofs["ppo"].note("resume", "killed after step 2", None)
        stated = statement(file_entries(folder), policy, "d" * 64, {"refusals": []}, None, proofs)
        (folder / STATEMENT).write_text(json.dumps(stated))
        if key:
            sign(folder, key)
        finished(folder)
        return folder

    return make


def test_a_statement_names_files_and_recipe_but_no_folder_of_this_machine(export):
    folder = export("one")
    stated = json.loads((folder / STATEMENT).read_text())
    assert stated["_type"] == "https://in-toto.io/Statement/v1"
    digest = hashlib.sha256(b"weights").hexdigest()
    assert {"name": "model.safetensors", "digest": {"sha256": digest}} in stated["subject"]
    (proof,) = check(folder)["certificates"].values()
    assert proof["tries"] == {"resume": [["killed after step 2", None]]}
    assert check(folder)["made_from"]["ppo"] == {
        "recipe": "f" * 64, "seed": 7, "inputs": {"sft_model": "a" * 64},
        "versions": {"torch": "2"}, "ranks": 1, "data": {},
        "config": {"base_model": {"path": "model"}, "split": {"sources": [{"path": "rows.jsonl"}]}},
    }  # fmt: skip


@pytest.mark.parametrize("name", [*FILES, STATEMENT, SUMS])
def test_a_flipped_bit_is_found(export, name):
    file = export("one") / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"changed|missing|new"):
        check(file.parent)


def test_a_missing_and_a_new_file_are_named(export):
    folder = export("one")
    (folder / "config.json").unlink()
    for name in ("modeling_x.py", "manifest.json"):
        (folder / name).write_text("")
    expected = r"config\.json: missing\nmanifest\.json: new\nmodeling_x\.py: new"
    with pytest.raises(ArtifactError, match=expected):
        check(folder)


@pytest.mark.parametrize("name", ["README.md", STATEMENT])
def test_a_file_of_another_export_is_refused_although_the_digests_were_made_again(export, name):
    folder = export("one")
    other = export("other", **{"README.md": "a better card"})
    shutil.copy(other / name, folder / name)
    finished(folder)
    with pytest.raises(ArtifactError, match=r"a statement on other files than these \(README.md\)"):
        check(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"subject": 3}', "{}"])
def test_a_statement_that_is_none_is_named(export, text):
    folder = export("one")
    (folder / STATEMENT).write_text(text)
    finished(folder)
    with pytest.raises(ArtifactError, match=f"{STATEMENT}: found no statement of an export"):
        check(folder)


def test_a_folder_without_a_statement_is_no_export(tmp_path):
    (tmp_path / SUMS).write_text("")
    with pytest.raises(ArtifactError, match=f"found no {STATEMENT}, expected an export"):
        check(tmp_path)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two private keys with their public ones."""
    folder = tmp_path_factory.mktemp("keys")
    pairs = []
    for name in ("own", "other"):
        key = ec.generate_private_key(ec.SECP256R1())
        private, public = folder / f"{name}.pem", folder / f"{name}.pub"
        plain = serialization.NoEncryption()
        kinds = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        private.write_bytes(key.private_bytes(*kinds, plain))
        kinds = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        public.write_bytes(key.public_key().public_bytes(*kinds))
        pairs.append((private, public))
    return pairs


def test_a_signature_binds_all_files_to_a_key(export, keys):
    (own, public), (_, stranger) = keys
    folder = export("one", own)
    assert check(folder, public)["policy"]["stage"] == "ppo"
    with pytest.raises(ArtifactError, match=r"found another signature than that of .*other\.pub"):
        check(folder, stranger)
    # Whoever can write the folder can write statement and digests again, but not sign them.
    forged = export("forged", **{"README.md": "a better card"})
    shutil.copy(folder / SIGNATURE, forged / SIGNATURE)
    finished(forged)
    check(forged)
    with pytest.raises(ArtifactError, match=SIGNATURE):
        check(forged, public)


def test_what_cannot_be_a_key_or_is_not_signed_is_named(export, keys, tmp_path):
    with pytest.raises(ConfigError, match=r"--sign: found .*nowhere\.pem, expected an elliptic"):
        export("one", tmp_path / "nowhere.pem")
    with pytest.raises(ArtifactError, match=f"found no {SIGNATURE}, expected a signed export"):
        check(export("two"), Path(keys[0][1]))
