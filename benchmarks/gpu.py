"""What the GPUs of this machine do: does everything work, how fast, and in how much memory?

    make gpu                                     # all parts, on all GPUs that it may use
    make gpu ARGS=--list                         # the parts: what each measures, and its time
    make gpu ARGS="--part generation trainer"    # some parts
    make gpu ARGS="--part trainer --rows '0.6B at 8k'"
    make gpu ARGS=--report                       # one page of all parts that have run
    make gpu ARGS=--cpu-rehearsal                # toy sizes on the CPU, to test this script

A part ends itself before nine minutes. What does not fit the time that is left is named as not run,
and can run by itself. A row that fails is a line with its reason, and the others still run. Each
part writes <results>/<part>.json after each row; the exit code is 0 if no row fails.

On a machine without this project's environment, `python benchmarks/gpu.py` needs src in PYTHONPATH
and these packages with theirs: torch, transformers, accelerate, deepspeed, pydantic,
pyarrow, psutil, regex, jinja2, click, scipy; peft for LoRA. It needs no network. Rows that start
`kedro run` or pytest are skipped there, and so are those of vLLM and bitsandbytes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import gpu_report
import gpu_rows
from gpu_rows import PARTS, Part, Row, Tree

from rlhf_pipeline.stages.launch.resources import visible_gpus

PROJECT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("gpu_worker.py")
SECONDS = 500
"""For the rows of a part, which then ends before nine minutes."""
ENDING_S = 15
"""Seconds for what a row has started to end by itself."""
STAGED = ("stages", "kills", "tests")
"""Kinds of rows that start programs by themselves."""
LIBRARIES = ("transformers", "deepspeed", "peft", "vllm", "bitsandbytes")
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-3}
"""Relative difference of losses that additions in another order may make."""


def versions() -> Tree:
    """What the figures depend on."""
    import torch

    found: Tree = {"commit": commit(), "python": platform.python_version()}
    found |= {"torch": torch.__version__, "CUDA": torch.version.cuda, "driver": "", "GPUs": []}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if (gpus := visible_gpus()) and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
        query.append(f"--id={','.join(gpus)}")
        listing = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        lines = [line.split(", ", 1) for line in listing.splitlines() if ", " in line]
        found |= {"driver": lines[0][0] if lines else "", "GPUs": [name for _, name in lines]}
    return found


def commit() -> str:
    """The current commit, marked if the work tree differs from it."""
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
    done = subprocess.run(describe, cwd=PROJECT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def obstacle(row: Row, gpus: int, *, toy: bool) -> str:
    """Why a row cannot run on this machine; empty if it can."""
    if toy and row.cuda_only:
        return f"CUDA only: {row.cuda_only}"
    if row.package and find_spec(row.package) is None:
        return f"needs the package {row.package}"
    if not toy and gpus < row.at_least:
        return f"needs {row.at_least} GPUs, found {gpus}"
    return ""


def run_part(name: str, chosen: Sequence[str], folder: Path, *, toy: bool) -> list[Tree]:
    """Run the rows of a part, and write its file after each."""
    part, gpus, start = PARTS[name], visible_gpus(), time.monotonic()
    rows = [row for row in part.rows if not chosen or row.name in chosen]
    found = versions()
    results: list[Tree] = []
    for together in groups(rows, len(gpus), toy=toy):
        left = SECONDS - (time.monotonic() - start)
        needed = 0 if toy else together[0].seconds
        if reason := obstacle(together[0], len(gpus), toy=toy):
            added = [unmeasured(row, "skip", reason) for row in together]
        elif needed > left:
            reason = f"is expected to take {needed} s, and the part had {left:.0f} s left"
            added = [unmeasured(row, "not run", reason) for row in together]
        else:
            ranks = 2 if toy and not together[0].gpus else together[0].gpus or len(gpus)
            added = launched(name, together, ranks, left, folder, toy=toy)
        for result in added:
            print(gpu_report.line(result), flush=True)
        results += added
        compare_losses(part, results)
        store(folder / f"{name}.json", found, results, part, time.monotonic() - start)
    shutil.rmtree(folder / "models", ignore_errors=True)
    shutil.rmtree(folder / "workspace", ignore_errors=True)  # what is cached measures nothing
    return results


def groups(rows: Sequence[Row], gpus: int, *, toy: bool) -> Iterator[list[Row]]:
    """Rows that one launch measures: one on a GPU, whose memory is then its own. A rehearsal spares
    the time to start."""

    def key(row: Row) -> tuple[object, ...]:
        alone = bool(obstacle(row, gpus, toy=toy)) or row.kind in STAGED or not toy
        return row.name if alone else "", row.gpus

    return (list(found) for _, found in groupby(rows, key))


def unmeasured(row: Row, verdict: str, reason: str) -> Tree:
    """The result of a row without values."""
    return {"of": row.name, "row": row.name, "verdict": verdict, "seconds": 0.0, "reason": reason}


def launched(
    part: str, rows: Sequence[Row], ranks: int, left: float, folder: Path, *, toy: bool
) -> list[Tree]:
    """Measure rows by a launch of some ranks; what it leaves out has not ended, or has failed."""
    found, logs = folder / "rows.jsonl", folder / "logs"
    found.unlink(missing_ok=True)
    logs.mkdir(exist_ok=True)
    names = [row.name for row in rows]
    job = {"part": part, "rows": names, "toy": toy, "results": str(found)}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        given = json.dumps(job | {"first": rank == 0})
        with (logs / f"{part}-{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(WORKER), given],
                    env=environment(rank, ranks, port, folder, staged=rows[0].kind in STAGED),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    ended = wait(processes, left)
    lines = found.read_text().splitlines() if found.is_file() else []
    results = [json.loads(line) for line in lines]
    for row in rows:
        results_of = [result for result in results if result["of"] == row.name]
        for result in results_of:
            result["anchor"] = row.anchor
        if not results_of and not ended:
            results.append(unmeasured(row, "not run", f"did not end in {left:.0f} s"))
        elif not results_of:
            log = (logs / f"{part}-0.log").read_text().strip().splitlines()
            results.append(unmeasured(row, "FAIL", f"ended early: {(log or ['no output'])[-1]}"))
    return results


def environment(rank: int, ranks: int, port: int, folder: Path, *, staged: bool) -> dict[str, str]:
    """The variables of a rank, as the driver sets them for a stage program."""
    sources = [str(PROJECT / "src"), os.environ.get("PYTHONPATH", "")]
    own = {
        gpu_rows.RESULTS: str(folder),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join(filter(None, sources)),
        "PYTHONUNBUFFERED": "1",
    }
    if staged:
        return os.environ | own
    cores = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    shared = {"OMP_NUM_THREADS": cores, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    own |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cuda" if visible_gpus() else "cpu",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # a resumed step repeats its sums
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    return shared | os.environ | own


def wait(processes: Sequence[subprocess.Popen[bytes]], left: float) -> bool:
    """Wait for ranks, and end all of them if one has failed or the time is over, which is False."""
    deadline = time.monotonic() + left
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            alive = [process for process in processes if process.poll() is None]
            for process in alive:
                os.killpg(process.pid, number)
            until = time.monotonic() + ENDING_S
            while any(process.poll() is None for process in alive) and time.monotonic() < until:
                time.sleep(0.1)


def compare_losses(part: Part, results: list[Tree]) -> None:
    """Let the rows of a part fail whose losses are not those of the first row of the precision."""
    precisions = {row.name: row.settings.get("deepspeed", {}).get("precision") for row in part.rows}
    first: dict[str, Tree] = {}
    for result in results if part.compared else []:
        if result["verdict"] != "pass":
            continue
        expected = first.setdefault(precisions[result["of"]], result)
        for name in ("first loss", "last loss"):
            own, other = result["values"][name], expected["values"][name]
            if not abs(own - other) <= TOLERANCE[precisions[result["of"]]] * abs(other):
                result["verdict"] = "FAIL"
                result["reason"] = f"found {name} {own:.6f}, expected {other:.6f} as in the first"


def store(file: Path, found: Tree, results: list[Tree], part: Part, seconds: float) -> None:
    """Write the file of a part. Rows of an earlier run stay if nothing else has changed."""
    earlier = json.loads(file.read_text()) if file.is_file() else {}
    kept = earlier.get("rows", []) if earlier.get("versions") == found else []
    measured = {result["of"] for result in results}
    rows = [result for result in kept if result["of"] not in measured] + results
    order = [row.name for row in part.rows]
    rows.sort(key=lambda result: order.index(result["of"]))
    record = {"part": file.stem, "measures": part.measures, "versions": found}
    record |= {"date": datetime.now(UTC).date().isoformat(), "seconds": seconds, "rows": rows}
    file.write_text(json.dumps(record, indent=2))


def main() -> int:
    """Run parts, or show what there is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--rows", nargs="+", default=[], help="only these rows of the part")
    parser.add_argument("--list", action="store_true", help="show the parts, run nothing")
    parser.add_argument("--report", action="store_true", help="write the page of what has run")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--results", type=Path, help="folder of the results")
    given = parser.parse_args()
    toy = given.cpu_rehearsal
    folder = given.results or gpu_rows.FOLDER.with_name("gpu-rehearsal" if toy else "gpu")
    folder = folder.absolute()
    if given.list:
        print(gpu_report.listing({name: PARTS[name] for name in given.part}))
        return 0
    if given.report:
        print(f"the page: {gpu_report.write(folder)}")
        return 0
    if toy:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not visible_gpus():
        print(
            "gpu: found 0 GPUs, expected at least one. Fix: check `nvidia-smi` and "
            "CUDA_VISIBLE_DEVICES, or rehearse on the CPU with --cpu-rehearsal"
        )
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    for name in given.part:
        print(f"{name}: {PARTS[name].measures}", flush=True)
        results += run_part(name, given.rows, folder, toy=toy)
    print(f"the page: {gpu_report.write(folder)}")
    return 1 if any(result["verdict"] == "FAIL" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
