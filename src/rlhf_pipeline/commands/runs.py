import json
from pathlib import Path

from kedro.io import CatalogProtocol
from rich.console import Console
from rich.table import Table

from rlhf_pipeline.commands.artifacts import artifact_datasets
from rlhf_pipeline.config.evaluate import REWARD_MODEL
from rlhf_pipeline.runtime.manifest import Manifest


def runs(catalog: CatalogProtocol, console: Console) -> None:
    """Print a line for each evaluation, by its newest published version."""
    versions = sorted(evaluations(catalog), key=lambda folder: folder.parent.name)
    found = {Manifest.read(folder).fingerprint: folder for folder in versions}
    if not found:
        console.print("No evaluation is published here. Fix: `kedro run --pipeline=full`")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("version", "policy", "seed", "win rate against SFT", "judge", "KL"):
        table.add_column(name, no_wrap=True)
    for folder in sorted(found.values(), key=lambda folder: folder.parent.name):
        table.add_row(*line(folder))
    console.print(table)


def evaluations(catalog: CatalogProtocol) -> list[Path]:
    """The published evaluations."""
    return [
        path
        for name, dataset in artifact_datasets(catalog).items()
        if name.endswith("evaluation")
        for path in dataset.versions()
    ]


def line(folder: Path) -> list[str]:
    """The cells of an evaluation."""
    manifest = Manifest.read(folder)
    compared = json.loads((folder / "evaluation.json").read_text())
    candidate, judge = compared["candidate"], compared.get("judge") or REWARD_MODEL
    rate = compared["win_rates"][judge]
    return [
        folder.parent.name,
        candidate,
        str(manifest.seed),
        f"{rate['rate']:.1%} [{rate['lower']:.1%}, {rate['upper']:.1%}]",
        "reward model" if judge == REWARD_MODEL else judge,
        f"{compared['policies'][candidate]['kl']:z.2f}",
    ]
