import json
from dataclasses import asdict
from pathlib import Path

from kedro.io import CatalogProtocol
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.diagnosis import machine
from rlhf_pipeline.diagnosis.finding import Finding, Setup, run_checks
from rlhf_pipeline.pipelines.table import parameter_blocks
from rlhf_pipeline.runtime.job import as_json

CHECKS = (
    machine.python,
    machine.libraries,
    machine.compiler,
    machine.gpu,
    machine.kernels,
    machine.shared_memory,
    machine.disk,
    machine.nodes,
)
"""All checks, in the order of the table."""
STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red"}


def doctor(catalog: CatalogProtocol) -> list[Finding]:
    """What all checks find."""
    blocks = {name: catalog.load(f"params:{name}") for name in parameter_blocks()}
    values = dict(leaves(as_json(blocks)))
    setup = Setup(
        root=Path(catalog.load("workspace")).absolute().parent,
        launch=blocks["launch"],
        compiles=tuple(
            f"{name} ({json.dumps(value)})"
            for name, value in values.items()
            if (name.rpartition(".")[2], value)
            in (("offload_optimizer", True), ("generator", "vllm"))
        ),
        precisions=sorted(
            {v for name, v in values.items() if name.endswith(".precision")} - {None}
        ),
    )
    return run_checks(CHECKS, setup)


def show(findings: list[Finding], console: Console, *, as_json: bool) -> None:
    """Print the findings: a table with the fix below what needs one, or JSON."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("check", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        fix = f"\nFix: {finding.fix}" if finding.fix else ""
        state = f"[{STYLES[finding.state]}]{finding.state}"
        table.add_row(f"[bold]{finding.check}", state, escape(finding.found + fix))
    console.print(table)
