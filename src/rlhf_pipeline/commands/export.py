"""`kedro rlhf export`: a policy as a folder of transformers, with a model card."""

import json
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import click
import fsspec
from huggingface_hub import metadata_load
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich.console import Console
from rich.filesize import decimal

from rlhf_pipeline.commands.command import Command
from rlhf_pipeline.commands.passport import STATEMENT, SUMS, sign, statement
from rlhf_pipeline.config.base_model import COMMIT
from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.errors import ConfigError, StageError, without_secrets
from rlhf_pipeline.kedro_run.artifacts import Ledger, Policy
from rlhf_pipeline.runtime.certificates import Certificate, certificate_for
from rlhf_pipeline.runtime.hub import UNKNOWN, license_of
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, file_entries
from rlhf_pipeline.stages.store import explained, open_store, upload
from rlhf_pipeline.tracking.store import registration
from rlhf_pipeline.verdict.comparison import read_evaluation
from rlhf_pipeline.verdict.words import metric_rows, summary


@click.command(cls=Command)
@click.argument("names", nargs=-1, required=True, metavar="[POLICY] DESTINATION")
@click.option(
    "--dtype",
    "precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Precision of the exported weights. Defaults to the one that they were saved in.",
)
@click.option(
    "--max-shard-size", default="5GB", show_default=True, help="Largest size of a file of weights."
)
@click.option(
    "--adapter",
    "base",
    metavar="BASE",
    help="Write only the LoRA adapter, and name this model as its base.",
)
@click.option(
    "--license",
    "license_name",
    default="unknown",
    show_default=True,
    help="License that the model card states.",
)
@click.option("--overwrite", is_flag=True, help="Replace the files of an earlier export.")
@click.option(
    "--sign", "key", type=click.Path(path_type=Path), help="Private key (PEM) that signs all files."
)
def export(
    ledger: Ledger, console: Console, names: tuple[str, ...], overwrite: bool, license_name: str,
    key: Path | None = None, **settings: Any,
) -> None:  # fmt: skip
    """Write POLICY with a model card and a statement of its origin to DESTINATION.

    The result needs transformers, but not this project. POLICY is a version or an alias of the
    registered model, or the folder of an artifact. The default is the champion. DESTINATION is a
    folder or any fsspec URL, such as s3://bucket/folder. The command reads every file back. The
    last file, SHA256SUMS, has the digests of all others; `kedro rlhf verify` checks a folder.
    """
    if len(names) > 2:
        raise click.UsageError(f"found {len(names)} names, expected [POLICY] DESTINATION")
    name, destination = ("champion", *names)[-2:]
    folder, workspace = ledger.language_model(name), ledger.workspace
    where = without_secrets(destination)
    with explained(destination):
        store, root = open_store(destination)
        store.invalidate_cache()
        former = _former(store, root, destination, overwrite=overwrite)
    workspace.mkdir(parents=True, exist_ok=True)
    writing = console.status(f"writing the policy to {where}, and reading it back")
    with writing, TemporaryDirectory(dir=workspace, prefix=".export-") as temporary:
        _convert(folder, temporary, settings)
        digest, model, policy = content_digest(folder), ledger.model, ledger.policy(name)
        version = registration(digest, model, ledger.project)
        proofs = proofs_of(policy, workspace)
        card = model_card(policy, digest, model, version, license_name, settings["base"], proofs)
        (Path(temporary) / "README.md").write_text(card, encoding="utf-8")
        evaluation, verdict = _evaluation(policy), gate_of(version)
        stated = statement(
            file_entries(Path(temporary)), policy, digest, verdict, evaluation, proofs
        )
        (Path(temporary) / STATEMENT).write_text(json.dumps(stated, indent=2), encoding="utf-8")
        if key is not None:
            sign(Path(temporary), key)
        with explained(destination):
            size = publish(Path(temporary), store, root, former)
    console.out(f"{name} is in {where}: {decimal(size)}, verified; {SUMS} has every digest")


def publish(
    source: Path, store: fsspec.AbstractFileSystem, root: str, former: Collection[str] = ()
) -> int:
    """Replace the `former` files: upload all, read each one back, then upload the digests.

    Returns the number of bytes. Raises StageError if a file has other bytes in the store.
    """
    if SUMS in former:
        store.rm_file(f"{root}/{SUMS}")
    entries = file_entries(source)
    for name, entry in entries.items():
        upload(store, source / name, f"{root}/{name}", entry.sha256)
    for name in {*former} - {SUMS, *entries}:
        store.rm_file(f"{root}/{name}")
    sums = "".join(f"{entry.sha256}  {name}\n" for name, entry in entries.items())
    store.pipe_file(f"{root}/{SUMS}", sums.encode())
    return sum(entry.size for entry in entries.values())


def _convert(source: Path, target: str, settings: dict[str, Any]) -> None:
    """Write weights and tokenizer in a process of its own, because that needs torch.

    Raises StageError with the last line of its log if it fails.
    """
    program = [sys.executable, "-P", "-m", "rlhf_pipeline.models.export"]
    command = [*program, str(source.resolve()), target, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
        raise StageError(f"weights: the policy was not exported: {reason}")


def _former(
    store: fsspec.AbstractFileSystem, root: str, destination: str, *, overwrite: bool
) -> set[str]:
    """The files of an earlier export. Raises ConfigError if they may not be replaced."""
    present = {path.removeprefix(root).lstrip("/") for path in store.find(root)}
    if present and not overwrite:
        raise ConfigError(
            f"{destination}: found {len(present)} files, expected none. Fix: choose another "
            "destination, or add --overwrite to replace an earlier export"
        )
    sums = store.cat_file(f"{root}/{SUMS}").decode() if SUMS in present else ""
    listed = {SUMS} | {line.partition("  ")[2] for line in sums.splitlines()}
    if foreign := sorted(present - listed):
        raise ConfigError(
            f"{destination}: found {foreign[0] or 'a file'!r}, which no finished export lists. "
            "Fix: remove it, or choose another destination"
        )
    return present


def model_card(
    policy: Policy,
    digest: str,
    model: str,
    registered: tuple[str, dict[str, str]] | None,
    license_name: str,
    adapter_of: str | None,
    proofs: Mapping[str, Certificate],
) -> str:
    """The card in Markdown with YAML front matter; only what is recorded, else "unknown".

    `registered` has the version and the tags of the policy in the registry; `adapter_of` is the
    base model of an exported adapter, `proofs` the certificates of its stages.
    """
    version = registered[0] if registered else None
    environment = Environment(  # noqa: S701 - Markdown; `_shown` escapes
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=_shown,
    )
    origins = [
        _origin(manifest)
        for manifest in policy.made_from.values()
        if manifest.stage in ("base_model", "reward_base", "critic_base", "teacher", "source")
    ]
    return environment.get_template("model_card.md.j2").render(
        title=f"{model} {policy.stage.upper()}" + (f", version {version}" if version else ""),
        policy=policy, digest=digest, license=license_name, origins=origins, leaves=leaves,
        evaluation=_evaluation(policy), adapter_of=adapter_of,
        verdict=gate_of(registered), proofs=proofs,
    )  # fmt: skip


def proofs_of(policy: Policy, workspace: Path) -> dict[str, Certificate]:
    """What `kedro rlhf prove` found on this machine for trainings like those of a policy."""
    found = {name: certificate_for(workspace, made) for name, made in policy.made_from.items()}
    return {name: each for name, each in found.items() if each is not None}


def gate_of(registered: tuple[str, dict[str, str]] | None) -> Any:
    """The verdict of the gate in the tags of a registered version; None without one."""
    return json.loads(registered[1].get("rlhf.verdict", "null")) if registered else None


def _shown(value: object) -> str:
    """A value as a cell of a Markdown table that shows it literally.

    JSON is for the front matter and stays.
    """
    if isinstance(value, Markup):
        return value
    text = str(value).replace("&", "&amp;").replace("<", "&lt;")
    return "<br>".join(re.sub(r"([\\`*_\[\]|~$])", r"\\\1", text).splitlines())


def _origin(manifest: Manifest) -> dict[str, str | None]:
    """A base model, a teacher or a source of data: its name, id on the hub, identity and licence.

    A path of this machine is not shown.
    """
    kind: Literal["dataset", "model"] = "dataset"
    if manifest.stage != "source":
        given = manifest.config["base_model"]
        path, kind = given["path"], "model"
        hub = path if COMMIT in manifest.inputs else None
        name = Path(path).name if path else f"{given['architecture']['model_type']}, random weights"
    else:
        source = SourceConfig.model_validate(manifest.config["source"])
        path, name = source.path, source.label()
        hub = source.name if path is None and "/" in source.name else None
    license_name = license_of(kind, hub, manifest.inputs.get(COMMIT)) if hub else UNKNOWN
    readme = Path(path or "") / "README.md"
    if hub is None and path is not None and readme.is_file():
        license_name = str((metadata_load(readme) or {}).get("license", UNKNOWN))
    identity = ", ".join(f"{each} {digest}" for each, digest in manifest.inputs.items())
    return {
        "what": manifest.stage.replace("_", " ") if kind == "model" else "data",
        "name": hub or name,
        "hub": hub,
        "identity": identity or f"recipe {manifest.fingerprint}",
        "license": "made by rlhf-pipeline" if path is None and hub is None else license_name,
    }


def _evaluation(policy: Policy) -> dict[str, Any] | None:
    """The newest evaluation of the policy as a candidate, or else as SFT; none of version 1.1."""
    read = ((read_evaluation(f, earlier=True), name) for f, name in policy.evaluations)
    found = [(compared, name) for compared, name in read if "judges" in compared]
    own = [compared for compared, name in found if compared["candidate"] == name]
    if not found:
        return None
    compared = own[0] if own else found[0][0]
    return compared | {"summary": summary(compared), "rows": metric_rows(compared)}
