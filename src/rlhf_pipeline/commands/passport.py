"""The statement of an exported model: what it is, and what it was made from; `kedro rlhf verify`.

A statement has the form of in-toto (https://in-toto.io/Statement/v1): its subjects are the files of
the folder, its predicate is what the records of this project say about the model.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from rlhf_pipeline.commands.command import Command, plain_table
from rlhf_pipeline.errors import ArtifactError, ConfigError, install, without_secrets
from rlhf_pipeline.kedro_run.artifacts import Policy
from rlhf_pipeline.runtime.certificates import Certificate
from rlhf_pipeline.runtime.manifest import NAME, FileEntry, Manifest, file_entries

SUMS = "SHA256SUMS"
"""The last file of an export, in the format of `sha256sum`: an export without it is incomplete."""
STATEMENT, SIGNATURE = "statement.json", "model.sig"
TYPE = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:rlhf-pipeline:model:1"
FOLDER = re.compile(r"/|~|\.{1,2}/|file:")
"""How a path of this machine begins."""


def statement(
    entries: Mapping[str, FileEntry], policy: Policy, digest: str, verdict: Any, evaluation: Any,
    proofs: Mapping[str, Certificate],
) -> dict[str, Any]:  # fmt: skip
    """The statement on the files of an export; what is not recorded is null.

    `digest` is that of the policy's content before the export; `verdict` is that of the gate. A
    path of this machine becomes a name.
    """
    predicate = {
        "policy": {"stage": policy.stage, "content": digest},
        "made_from": {stage: _record(made) for stage, made in policy.made_from.items()},
        "evaluation": evaluation,
        "gate": verdict,
        "certificates": {stage: asdict(each) for stage, each in proofs.items()},
    }
    return {
        "_type": TYPE,
        "subject": [{"name": n, "digest": {"sha256": e.sha256}} for n, e in entries.items()],
        "predicateType": PREDICATE,
        "predicate": _without_folders(predicate),
    }


def _record(made: Manifest) -> dict[str, Any]:
    kept = {name: getattr(made, name) for name in ("seed", "config", "inputs", "versions", "ranks")}
    data = {name: value for name, value in made.metrics.items() if name.startswith("data/")}
    return {"recipe": made.fingerprint, **kept, "data": data}


def _without_folders(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_folders(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(each) for each in value]
    if not isinstance(value, str):
        return value
    return PurePath(value).name if FOLDER.match(value) else without_secrets(value)


def sign(folder: Path, key: Path) -> None:
    """Sign all files of a folder with an elliptic key, in the form of OpenSSF's model-signing.

    Raises ConfigError if the package is missing or the key cannot sign.
    """
    with _signing("--sign", key):
        from model_signing import signing

        signer = signing.Config().use_elliptic_key_signer(private_key=key)
        signer.set_hashing_config(_hashing(folder)).sign(folder, folder / SIGNATURE)


def check(folder: Path, key: Path | None = None) -> dict[str, Any]:
    """The statement of an exported folder.

    Raises ArtifactError with the first files that were changed, added or removed, or if the
    statement is one on other files; with a public key, also if the signature is not its own.
    """
    if not (folder / SUMS).is_file() or not (folder / STATEMENT).is_file():
        missing = " and ".join(n for n in (SUMS, STATEMENT) if not (folder / n).is_file())
        raise ArtifactError(
            f"{folder}: found no {missing}, expected an export of this version. Fix: `kedro rlhf "
            "export` writes both"
        )
    lines = (line.partition("  ") for line in (folder / SUMS).read_text().splitlines())
    listed = {name: digest for digest, _, name in lines}
    found = {name: entry.sha256 for name, entry in file_entries(folder).items() if name != SUMS}
    found |= {NAME: ""} if (folder / NAME).exists() else {}  # of an artifact, which this is not
    wrong = sorted(name for name, _ in listed.items() ^ found.items())
    faults = [f"{name}: {_how(name, listed, found)}" for name in dict.fromkeys(wrong)]
    if faults:
        raise ArtifactError("\n".join([f"{folder}: found other files than {SUMS} lists:", *faults]))
    with _stated(folder):
        stated = json.loads((folder / STATEMENT).read_text())
        subjects = {each["name"]: each["digest"]["sha256"] for each in stated["subject"]}
        kinds, predicate = (stated["_type"], stated["predicateType"]), dict(stated["predicate"])
    others = {name for name, _ in subjects.items() ^ found.items()} - {STATEMENT, SIGNATURE}
    if kinds != (TYPE, PREDICATE) or others:
        raise ArtifactError(
            f"{folder / STATEMENT}: found a statement on other files than these "
            f"({', '.join(sorted(others)[:3])}), expected the one of this export. Fix: export again"
        )
    if key is not None:
        if SIGNATURE not in found:
            raise ArtifactError(f"{folder}: found no {SIGNATURE}, expected a signed export")
        with _signing("--key", key):
            from model_signing import verifying

            verifier = verifying.Config().use_elliptic_key_verifier(public_key=key)
            try:
                verifier.set_hashing_config(_hashing(folder)).verify(folder, folder / SIGNATURE)
            except ValueError as error:
                raise ArtifactError(
                    f"{folder / SIGNATURE}: found another signature than that of {key}: {error}"
                ) from None
    return predicate


@contextmanager
def _stated(folder: Path) -> Iterator[None]:
    """Explain a statement that lacks something."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{folder / STATEMENT}: found no statement of an export ({type(error).__name__}: "
            f"{error}), expected the one that `kedro rlhf export` writes. Fix: export again"
        ) from None


def _how(name: str, listed: Mapping[str, str], found: Mapping[str, str]) -> str:
    return "changed" if name in listed and name in found else "missing" if name in listed else "new"


def _hashing(folder: Path) -> Any:
    from model_signing import hashing

    ignored = [folder / name for name in (SUMS, SIGNATURE)]
    return hashing.Config().set_ignored_paths(paths=ignored, ignore_git_paths=False)


@contextmanager
def _signing(option: str, key: Path) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise ConfigError(
            f"{option}: found no package model-signing. Fix: {install('signing')}"
        ) from None
    except (OSError, TypeError) as error:
        raise ConfigError(f"{option}: found {key}, expected an elliptic key: {error}") from None


@click.command(cls=Command)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--key", type=click.Path(path_type=Path), help="Public key of who signed the export.")
def verify(console: Console, folder: Path, key: Path | None) -> None:
    """Check every byte of an exported FOLDER, and show what its statement says.

    The command fails if a file was changed, added or removed, if the statement is that of another
    export, or if --key did not sign it.
    """
    with console.status("reading every byte"):
        stated = check(folder, key)
    with _stated(folder):
        proofs = {n: Certificate(**c).summary() for n, c in stated["certificates"].items()}
        table = plain_table("stage", "recipe", "seed", "made from", "proven")
        for stage, made in stated["made_from"].items():
            inputs = ", ".join(f"{name} {digest[:8]}" for name, digest in made["inputs"].items())
            seed, proof = str(made["seed"]), proofs.get(stage, "unknown")
            table.add_row(*map(escape, (stage, made["recipe"][:8], seed, inputs, proof)))
        console.print(table, "")
        verdict, evaluation = stated["gate"], stated["evaluation"]
        console.print(
            escape(str(evaluation["summary"])) if evaluation else "No evaluation is recorded."
        )
        gate = "unknown" if verdict is None else "refused" if verdict["refusals"] else "passed"
        console.print(f"gate: {gate}. Every byte is as it was exported.")
    signed = f"signed by the owner of {key}" if key else "not checked; --key checks it"
    console.print(f"signature: {signed}")
