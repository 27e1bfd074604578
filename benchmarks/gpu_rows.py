"""The rows of `gpu.py` from `gpu.toml`, and what a GPU can do at most."""

from __future__ import annotations

import os
import subprocess
import threading
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_pipeline.sizing.models import MODELS, Shape
from rlhf_pipeline.stages.launch.resources import visible_gpus

Tree = dict[str, Any]

RESULTS = "GPU_BENCHMARK_RESULTS"
"""Environment variable with the folder of the results."""
FOLDER = Path(os.environ.get(RESULTS, Path(__file__).parent / "results" / "gpu"))
CARDS = {
    "B200": (2250, 8000),
    "H200": (989, 4800),
    "H100 PCIe": (756, 2000),
    "H100 NVL": (835, 3900),
    "H100": (989, 3350),
    "A100-SXM4-40": (312, 1555),
    "A100-PCIE-40": (312, 1555),
    "A100": (312, 2039),
    "L40S": (362, 864),
    "RTX A6000": (155, 768),
    "A10": (125, 600),
    "L4": (121, 300),
    "4090": (165, 1008),
    "3090": (71, 936),
    "V100": (125, 900),
    "T4": (65, 320),
}
"""TFLOP/s of dense products in half precision and GB/s of memory, as NVIDIA's data sheets say, by a
part of the name that torch gives a GPU; the first that fits counts."""


def limits_of(card: str) -> tuple[float, float] | None:
    """Operations and bytes a second of a GPU; None if it is not known."""
    found = next((limits for name, limits in CARDS.items() if name in card), None)
    return None if found is None else (found[0] * 1e12, found[1] * 1e9)


def bytes_of_token(shape: Shape, rows: int, prompt: int, response: int, size: int = 2) -> float:
    """What the step of a token must read: every weight once, without the input embeddings that are
    only looked up; and in each row the keys and values of the tokens before it, on average."""
    weights = shape.matrices + shape.vectors + shape.vocab * shape.embedding
    seen = prompt + response / 2
    return size * (weights + rows * seen * 2 * shape.layers * shape.keys)


def share_of_bandwidth(read: float, seconds: float, bandwidth: float) -> float:
    """The time that reading so many bytes takes at least, as a share of the seconds of a step."""
    return read / bandwidth / seconds


def training_flops(shape: Shape, tokens: float, context: float, adapters: bool = False) -> float:
    """Operations of both passes without recomputation: 2 for each weight and token, and those of
    causal attention over rows of `context` tokens on average. The backward pass costs twice as much
    as the forward pass, with adapters as much."""
    weights = shape.matrices + shape.vocab * shape.embedding
    forward = tokens * (2 * weights + 2 * shape.layers * shape.queries * context)
    return (2 if adapters else 3) * forward


def mfu(flops: float, seconds: float, peak: float, gpus: int) -> float:
    """Operations a second as a share of what the GPUs can do (model FLOPs utilization)."""
    return flops / seconds / (peak * gpus)


@dataclass(frozen=True)
class Row:
    """Something to measure; `gpu.toml` explains the fields."""

    name: str
    kind: str
    seconds: int = 60
    gpus: int = 1
    at_least: int = 1
    package: str = ""
    cuda_only: str = ""
    anchor: str = ""
    settings: Tree = field(default_factory=dict)

    @classmethod
    def of(cls, fields: Tree) -> Row:
        """A row from its fields; those that it does not know are settings."""
        known = {name: value for name, value in fields.items() if name in cls.__annotations__}
        return cls(**known, settings={n: v for n, v in fields.items() if n not in known})


@dataclass(frozen=True)
class Part:
    """Rows that run in less than nine minutes on one H100."""

    measures: str
    rows: tuple[Row, ...]
    compared: bool = False
    """Whether rows of equal precision must have equal losses."""

    @property
    def minutes(self) -> float:
        """Expected time."""
        return sum(row.seconds for row in self.rows) / 60


def _parts() -> dict[str, Part]:
    table = tomllib.loads(Path(__file__).with_name("gpu.toml").read_text())
    return {
        name: Part(
            part["measures"],
            tuple(Row.of(part.get("shared", {}) | fields) for fields in part["rows"]),
            part.get("compared", False),
        )
        for name, part in table.items()
    }


PARTS = _parts()
TOY: Tree = {
    "rows": 4,
    "batch": 4,
    "prompt": 8,
    "response": 8,
    "length": 32,
    "tokens": 64,
    "steps": 3,
}
"""Sizes of a rehearsal."""


def settings_of(row: Row, *, toy: bool) -> Tree:
    """The settings of a row, or those of its rehearsal."""
    given = row.settings | {"name": row.name, "kind": row.kind, "toy": toy}
    return given | TOY if toy else given


def architecture(name: str, *, toy: bool, positions: int) -> Tree:
    """The configuration of a published model, with room for so many tokens; a rehearsal's is tiny.

    The family stays, so a rehearsal runs the same code.
    """
    fields = dict(MODELS[name].config)
    if toy:
        fields |= {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}
        sizes = {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 128,
            "ffn_dim": 128,
            "word_embed_proj_dim": 64,
        }
        fields |= {name: size for name, size in sizes.items() if name in fields}
    fields["max_position_embeddings"] = max(fields["max_position_embeddings"], positions)
    return fields


class Memory(threading.Thread):
    """Reads the used memory of the GPUs once a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self._peak: int | None = None
        self.start()

    def run(self) -> None:
        """Read until `stop`."""
        gpus = visible_gpus()
        query = [
            "nvidia-smi",
            "--query-gpu=index,uuid,memory.used",
            "--format=csv,noheader,nounits",
        ]
        while gpus and not self._ended.wait(1):
            listing = subprocess.run(query, capture_output=True, text=True, check=False).stdout
            for line in listing.splitlines():
                index, uuid, used = line.split(", ")
                is_ours = index in gpus or any(uuid.startswith(gpu) for gpu in gpus)
                if is_ours and used.isdigit():  # [N/A] with MIG, and where memory is shared
                    self._peak = max(self._peak or 0, int(used))

    def stop(self) -> int | None:
        """End; return the peak in MiB."""
        self._ended.set()
        self.join()
        return self._peak
