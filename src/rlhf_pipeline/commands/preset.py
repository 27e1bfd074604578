from pathlib import Path

import click
from rich.console import Console

from rlhf_pipeline.commands.command import Command, gpus_option, plain_table
from rlhf_pipeline.errors import ConfigError, as_typed
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.sizing.models import MODELS
from rlhf_pipeline.sizing.presets import (
    HARDWARE,
    METHODS,
    ROADS,
    Method,
    Road,
    as_yaml,
    find_preset,
    make_preset,
)


@click.command(cls=Command)
@click.argument("model", required=False)
@gpus_option
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="full",
    show_default=True,
    help="What trains: all weights, adapters, or adapters beside 4-bit weights.",
)
@click.option(
    "--pipeline",
    "road",
    type=click.Choice([*ROADS]),
    default="full",
    show_default=True,
    help="Pipeline that the preset is for. One for full also works for dpo and kto.",
)
@click.option(
    "--instruct",
    is_flag=True,
    help="Start from the chat model that was made from MODEL, and leave SFT out.",
)
@click.option(
    "--reward-model",
    "reward",
    type=click.Choice([*MODELS]),
    metavar="NAME",
    help="Start the reward model from this smaller model, such as opt-350m.",
)
@click.option(
    "--output", type=click.Path(path_type=Path), help="Folder to write.  [default: conf/MODEL-GPUS]"
)
@click.option("--overwrite", is_flag=True, help="Replace the files of an earlier environment.")
@click.option(
    "--list", "listing", is_flag=True, help="Show which models fit which GPUs, and write nothing."
)
def preset(
    console: Console, project: Path, model: str | None, gpus: str | None, method: Method,
    road: Road, instruct: bool, reward: str | None, output: Path | None, overwrite: bool,
    listing: bool,
) -> None:  # fmt: skip
    """Write an environment for MODEL, such as opt-1.3b, on the GPUs of --gpus.

    Its hyper-parameters are published values, and its memory settings are the cheapest ones that
    fit. Run it with `kedro run --env=NAME`.
    """
    if listing:
        table = plain_table("model", *HARDWARE)
        for each in MODELS if model is None else (model,):
            fitting = ([m for m in METHODS if find_preset(each, gpus, m)] for gpus in HARDWARE)
            table.add_row(each, *("".join(m[0].upper() for m in own) or "-" for own in fitting))
        console.print(table)
        console.print("F: all weights, L: LoRA, Q: QLoRA")
        return
    if model is None or gpus is None:
        raise click.UsageError("use MODEL and --gpus, or --list")
    made = make_preset(model, gpus, method, road, instruct=instruct, reward=reward)
    folder = project / "conf" / made.name if output is None else output
    texts = {
        "globals.yml": f"root: data/{folder.name}\n",
        "parameters.yml": as_yaml(made, folder.name),
    }
    present = [name for name in texts if (folder / name).exists()]
    if present and not overwrite:
        raise ConfigError(
            f"{folder}: found {present[0]}, expected a new folder. Fix: choose another one with "
            "--output, or add --overwrite to replace it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomically(folder / name, text)
    command = f"{as_typed('kedro rlhf')} plan --env={folder.name} --gpus={gpus}"
    own_road = "" if road == "full" else f" --pipeline={road}"
    console.out(f"{folder} is written. Next: {command}{own_road}")
