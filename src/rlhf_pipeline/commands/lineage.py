import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.tree import Tree

from rlhf_pipeline.commands.command import Command
from rlhf_pipeline.config.base_model import BYTES
from rlhf_pipeline.errors import ArtifactError, printable, short_path
from rlhf_pipeline.kedro_run.artifacts import Ledger
from rlhf_pipeline.runtime.manifest import (
    Manifest,
    artifact_of,
    content_digest,
    folder_digest,
    verify,
)
from rlhf_pipeline.stages.cache.workspace import work_directory


@click.command(cls=Command)
@click.argument("policy", default="champion")
def lineage(ledger: Ledger, console: Console, policy: str) -> None:
    """Show what POLICY was made from, down to the data, and verify every byte.

    POLICY is a version or an alias of the registered model, or the folder of an artifact. The
    default is the champion. The command fails if a file was changed, added or removed, or an input
    is not on this machine. The message names the first such file of each artifact.
    """
    walk = Walk(ledger)
    tree = Tree(f"[bold]{escape(policy)}", guide_style="dim")
    with console.status("reading every byte"):
        walk.visit(tree, "policy", ledger.folder(policy))
    console.print(tree, highlight=False)
    if walk.faults:
        raise ArtifactError("\n".join([f"lineage of {policy}:", *walk.faults]))
    console.print(f"{walk.files} files, {decimal(walk.size)}: every byte is as it was recorded.")


@dataclass
class Walk:
    """Visits artifacts and what they were made from."""

    ledger: Ledger
    faults: list[str] = field(default_factory=list)
    files: int = 0
    size: int = 0
    """Bytes."""
    _visited: set[Path] = field(default_factory=set)

    def visit(self, branch: Tree, name: str, folder: Path) -> None:
        """Add an artifact, or a folder in one, and its inputs below it."""
        artifact = artifact_of(folder) or folder
        manifest = Manifest.read(artifact)
        label = escape(printable(f"{name}: {manifest.stage} {manifest.fingerprint[:8]}"))
        if artifact in self._visited:
            branch.add(f"{label}, see above")
            return
        self._visited.add(artifact)
        size = sum(entry.size for entry in manifest.files.values())
        label += f", {len(manifest.files)} files, {decimal(size)}"
        path = f"[link={folder.resolve().as_uri()}]{escape(short_path(folder))}[/link]"
        try:
            verify(artifact)
            below = branch.add(f"{label}\n[dim]{path}")
        except ArtifactError as error:
            self.faults.append(str(error))
            below = branch.add(f"[red]{label}: {escape(printable(self.faults[-1]))}")
        self.files += len(manifest.files)
        self.size += size
        work = work_directory(artifact, self.ledger.workspace)
        paths = {} if work is None else json.loads((work / "job.json").read_text())["inputs"]
        if BYTES in manifest.inputs:  # a local base model
            paths[BYTES] = manifest.config["base_model"]["path"]
        for source, digest in manifest.inputs.items():
            if digest in self.ledger.by_digest:
                self.visit(below, source, self.ledger.by_digest[digest])
            else:
                outside = Path(paths[source]) if source in paths else None
                self._leaf(below, source, digest, outside)

    def _leaf(self, branch: Tree, name: str, digest: str, path: Path | None) -> None:
        """Add an input that no stage made: a file, or an identity such as a commit on the hub."""
        if path is None and not re.fullmatch("[0-9a-f]{64}", digest):
            branch.add(f"{escape(name)}: {escape(digest)}")
            return
        found = "nothing"
        if path is not None and path.exists():
            is_foreign = path.is_dir() and artifact_of(path) is None
            found = folder_digest(path) if is_foreign else content_digest(path)
        if path is None or found != digest:
            place = name if path is None else path
            self.faults.append(f"{place}: found {found[:16]}, expected content {digest[:16]}")
            branch.add(f"[red]{escape(name)}: {escape(self.faults[-1])}")
            return
        files = [file for file in (path, *path.rglob("*")) if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        self.files += len(files)
        self.size += size
        what = f"{len(files)} files, {decimal(size)}, not made by this project"
        branch.add(f"{escape(name)}: {what}\n[dim]{escape(short_path(path))}")
