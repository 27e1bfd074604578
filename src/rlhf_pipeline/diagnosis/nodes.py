import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from rlhf_pipeline.diagnosis.finding import BUDGET_S, Finding, Setup
from rlhf_pipeline.stages.launch.cluster import on_several_machines
from rlhf_pipeline.stages.launch.failure import log_tail, logged_cause
from rlhf_pipeline.stages.launch.layout import node_layout
from rlhf_pipeline.stages.launch.node_program import NodeProgram

START_S = BUDGET_S - 5
"""Seconds in which a rank must start on every machine."""
PROGRAM = "platform"
"""A module of Python that says where it runs, and needs neither torch nor a job."""


def nodes(setup: Setup) -> Finding:
    """Every rank starts: its machine has the driver's files, code and libraries."""
    if setup.launch.mode == "local":
        return Finding("nodes", "ok", "this machine trains alone")
    layout = node_layout(setup.launch, setup.gpus)
    setup.root.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="nodes-", dir=setup.root.resolve()) as folder:
        program = on_several_machines(NodeProgram(PROGRAM, folder), setup.launch, layout)
        with program.running() as process:
            try:
                code: int | None = process.wait(START_S)
            except subprocess.TimeoutExpired:
                code = None
        if code == 0:
            found = f"{program.ranks} ranks start on {len(layout.ranks)} machines"
            return Finding("nodes", "ok", found)
        cause = logged_cause(Path(folder)) or f"found exit code {code}"
        if code is None:
            cause = f"found ranks that do not start within {START_S:g} s"
        fix = "mend what the output says; the first machine must be this one"
        return Finding("nodes", "failure", f"{cause}{log_tail(Path(folder))}", fix)
