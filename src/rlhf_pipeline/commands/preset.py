from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.presets.hyperparameters import Method
from rlhf_pipeline.presets.preset import (
    HARDWARE,
    METHODS,
    Preset,
    as_yaml,
    find_preset,
    make_preset,
)
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.sizing.models import MODELS


def files(preset: Preset, name: str) -> dict[str, str]:
    """The files of the environment `name`."""
    return {"globals.yml": f"root: data/{name}\n", "parameters.yml": as_yaml(preset, name)}


def write(
    model: str,
    gpus: str,
    method: Method,
    project: Path,
    console: Console,
    *,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Write the environment of a preset.

    Raises ConfigError if the preset does not fit, or the folder has files and `overwrite` is false.
    """
    preset = make_preset(model, gpus, method)
    folder = project / "conf" / preset.name if output is None else output
    present = [name for name in files(preset, folder.name) if (folder / name).exists()]
    if present and not overwrite:
        raise ConfigError(
            f"{folder}: found {present[0]}, expected a new folder. Fix: choose another one with "
            "--output, or add --overwrite to replace it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files(preset, folder.name).items():
        write_atomically(folder / name, text)
    console.out(f"{folder} is written. Next: kedro rlhf plan --env={folder.name} --gpus={gpus}")


def show_table(console: Console, model: str | None = None) -> None:
    """Print which methods fit, for each model, or one, and the hardware of the table."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("model", *HARDWARE):
        table.add_column(name, no_wrap=True)
    for each in MODELS if model is None else (model,):
        table.add_row(each, *(_fitting(each, gpus) for gpus in HARDWARE))
    console.print(table)
    console.print("F: all weights, L: LoRA, Q: QLoRA")


def _fitting(model: str, gpus: str) -> str:
    fitting = (m[0].upper() for m in METHODS if find_preset(model, gpus, m) is not None)
    return "".join(fitting) or "-"
