import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import fsspec
from rich.console import Console
from rich.filesize import decimal

from rlhf_pipeline.commands.artifacts import Ledger
from rlhf_pipeline.commands.command import Command
from rlhf_pipeline.commands.model_card import model_card
from rlhf_pipeline.errors import ConfigError, StageError, without_secrets
from rlhf_pipeline.runtime.manifest import content_digest, file_entries
from rlhf_pipeline.storage.store import explained, open_store, upload
from rlhf_pipeline.tracking.registry import registration

SUMS = "SHA256SUMS"
"""The last file of an export, in the format of `sha256sum`: an export without it is incomplete."""


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
def export(
    ledger: Ledger, console: Console, names: tuple[str, ...], overwrite: bool, license_name: str,
    **settings: Any,
) -> None:  # fmt: skip
    """Write POLICY with a model card to DESTINATION.

    The result needs transformers, but not this project. POLICY is a version or an alias of the
    registered model, or the folder of an artifact. The default is the champion. DESTINATION is a
    folder or any fsspec URL, such as s3://bucket/folder. The command reads every file back. The
    last file, SHA256SUMS, has the digests of all others.
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
        card = model_card(policy, digest, model, version, license_name, settings["base"])
        (Path(temporary) / "README.md").write_text(card, encoding="utf-8")
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
