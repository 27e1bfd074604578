import json

import click

from rlhf_pipeline.commands.command import Command


@click.command(cls=Command)
def prompts(catalog, console):
    """Show how many rows each part of the split has."""
    report = json.loads((catalog.load("split") / "report.json").read_text())
    for path, file in report["files"].items():
        console.print(path, file["rows"])
