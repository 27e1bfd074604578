"""The rank lab: two real ranks run the cases of many test files in one launch.

A test file names its cases and computes one of them; a test reads its cell:

    CASES = {"bf16, ZeRO 2": ("bf16", 2), ...}          # arguments by name, as JSON types

    def case(lab, precision, zero_stage): ...   # on every rank; the first one's result counts

    @pytest.mark.parametrize("name", CASES)
    def test_something(cells, name):
        assert cells[name] == ...

The first test that asks for `cells` launches the cases of all files of this run whose tests ask for
them. A case returns JSON types; it judges tensors on the ranks. Workers of pytest-xdist share the
results. The cases of tests that are marked `gpu` run in another launch, on GPUs. As a program, this
file runs under DeepSpeed's launcher with a request and a folder.
"""

import gc
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock


@dataclass(frozen=True)
class Lab:
    """What a case gets: its rank, models by family, inputs by name, and an empty folder."""

    world: Any
    models: Mapping[str, Path]
    inputs: Mapping[str, Path]
    """The inputs of all programs, for `tiny_job`."""
    folder: Path


FAMILIES = ("gpt_neox", "qwen2", "qwen3", "olmo3", "smollm3", "gemma3_text", "gemma4_text",
            "qwen3_5_text", "qwen3_next", "lfm2", "granitemoehybrid")  # fmt: skip
"""Those of `lab.models`, beside Llama."""
FILES: dict[str, dict[str, list[str]]] = {"cpu": {}, "cuda": {}}
"""The names of the cases to run, by device and test file."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Remember the cases that the chosen tests read."""
    for item in session.items:
        if "cells" in getattr(item, "fixturenames", ()):
            cases = item.module.CASES
            chosen = item.callspec.params.get("name") if hasattr(item, "callspec") else None
            wanted = {chosen} if chosen in cases else set(cases)
            files = FILES["cuda" if item.get_closest_marker("gpu") else "cpu"]
            files[str(item.path)] = sorted({*files.get(str(item.path), ()), *wanted})


@pytest.fixture(scope="session")
def _results(on_ranks, make_model, program_inputs, shared):
    """The results of all cases by file, from one launch by whichever worker is first."""

    @cache
    def results(device):
        with FileLock(shared / "rank_lab.lock"):
            found = shared / f"rank_lab_{device}.json"
            if not found.exists():
                found.touch()
                models = {name: make_model(name, seed=3) for name in ("llama", *FAMILIES)}
                argument = {"models": models, "inputs": program_inputs, "files": FILES[device]}
                ranks = 2 if device == "cpu" else min(2, torch.cuda.device_count())
                folder = on_ranks(__file__, argument, ranks=ranks, accelerator=device)
                found.write_text((folder / "cells.json").read_text())
            if not (text := found.read_text()):
                pytest.fail("the rank lab has failed in another test")
            return json.loads(text)

    return results


@pytest.fixture
def cells(_results, request):
    """What the cases of the test's file returned, by name."""
    device = "cuda" if request.node.get_closest_marker("gpu") else "cpu"
    return _results(device)[str(request.path)]


no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ON_GPU = [pytest.mark.gpu, no_gpu]
"""The marks of a test whose case runs on GPUs."""


def main(argument: dict[str, Any], folder: Path) -> None:
    """Run the cases one after the other; the first rank writes what they return."""
    from rlhf_pipeline.distributed.world import join

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # a GPU repeats its sums
    world = join(1, timeout_s=600)
    models, inputs = (
        {name: Path(path) for name, path in argument[kind].items()} for kind in ("models", "inputs")
    )
    modules = {}
    for file in argument["files"]:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        modules[file] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[file])
    gc.freeze()  # programs collect garbage, which takes half a second in the imported libraries
    found: dict[str, dict[str, Any]] = {}
    for file, names in argument["files"].items():
        for name in names:
            print(f"rank lab: {Path(file).stem}: {name}", flush=True)
            lab = Lab(world, models, inputs, folder / Path(file).stem / name)
            lab.folder.mkdir(parents=True, exist_ok=True)
            found.setdefault(file, {})[name] = modules[file].case(lab, *modules[file].CASES[name])
    if world.rank == 0:
        (folder / "cells.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
