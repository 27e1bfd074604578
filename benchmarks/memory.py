"""How much main memory does each stage of a run need?

    python benchmarks/memory.py --env=tiny                       # any options of `kedro run`
    python benchmarks/memory.py --env=smollm2 --nodes=ppo

A stage's memory is the sum over its ranks, in which pages that ranks share count once (PSS), read
twice a second. A table has the most of each stage. On a GPU, `make gpu` reads the GPU's memory.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

import psutil
from rich.console import Console
from rich.table import Table

EVERY_S = 0.5
PROGRAM = re.compile(r" -m rlhf_pipeline\.(?!stages)\w+\.(\w+) ")


def main() -> int:
    """Run; print a row for each stage."""
    peaks: dict[str, int] = {}
    run = subprocess.Popen(["kedro", "run", *sys.argv[1:]])
    while run.poll() is None:
        time.sleep(EVERY_S)
        for stage, now in by_stage(psutil.Process(run.pid)).items():
            peaks[stage] = max(peaks.get(stage, 0), now)
    table = Table("stage", "GB of main memory", title="Most memory of each stage, all ranks")
    for stage, peak in peaks.items():
        table.add_row(stage, f"{peak / 1e9:.2f}")
    Console().print(table)
    return run.returncode


def by_stage(driver: psutil.Process) -> dict[str, int]:
    """Bytes of main memory that the programs of the driver use now, by program."""
    found: dict[str, int] = {}
    try:
        processes = driver.children(recursive=True)
    except psutil.NoSuchProcess:
        return {}
    for process in processes:
        try:
            stage = PROGRAM.search(" ".join(process.cmdline()))
            if stage is not None:
                used = process.memory_full_info().pss
                found[stage[1]] = found.get(stage[1], 0) + used
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
