"""What ZeRO sends: measured over a simulated network beside the formula, then 64 GPUs on paper.

    python benchmarks/communication.py measured     # 2, 4 and 8 processes; needs root
    python benchmarks/communication.py collectives  # bytes of each collective of Gloo; needs root
    python benchmarks/communication.py model        # the tables for GPUs, and the plot

`measured` trains a small Llama with this project's engines, one process on each node of
`simulated_network.py`, and compares bytes and seconds of an optimizer step with
`communication_volume`. Bytes are those of the interface, with all headers. The
predicted seconds are those without a limit of the network, plus those of the formula. The settings
(buckets, live weights) are scaled to the model, so it communicates as a large model does; rows "as
set" have the project's own. Nothing in `model` was measured: `communication_paper.py` states every
assumption. Results: benchmarks/results/communication/.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import communication_paper
from communication_volume import (
    Collectives,
    Link,
    gathered,
    total_seconds,
    total_sent,
    training_step,
)
from rich.console import Console
from rich.table import Table
from simulated_network import Network, Ranks, started

PROJECT = Path(__file__).parents[1]
RESULTS = PROJECT / "benchmarks" / "results" / "communication"
RANK = Path(__file__).with_name("communication_rank.py")
ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 2}
"""Passes around the ring of Gloo's collectives."""
SIZES = (400_000, 4_000_000)
"""Bytes of the tensors of single collectives."""
WIDTH = 4
"""Bytes of a number: everything is in fp32."""
BUCKET, LIVE, LAYER = 100_000, 200_000, 655_872
"""Elements in a collective, weights that stay whole, weights of a layer."""
AS_LARGE = {"stage3_max_reuse_distance": LIVE, "stage3_max_live_parameters": LIVE}
NETWORKS = {"200 Mbit/s, 1 ms": (200, 0.001), "100 Mbit/s, 5 ms": (100, 0.005)}


@dataclass(frozen=True)
class Case:
    """One way to train."""

    stage: int
    micro_batches: int = 1
    as_set: bool = False
    """With the project's own settings, which suit models of many billions."""
    checkpointing: bool = False

    @property
    def name(self) -> str:
        """As in the table."""
        extras = ("as set" * self.as_set, "checkpointing" * self.checkpointing)
        return ", ".join([f"ZeRO-{self.stage}", *filter(None, extras)])

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `Rank.build`."""
        own = {"bucket": 50_000_000} if self.as_set else {"bucket": BUCKET, **AS_LARGE}
        return {"stage": self.stage, "checkpointing": self.checkpointing, **own}

    def step(self, parameters: int) -> list[Collectives]:
        """What the formula says that it sends."""
        limits = {} if self.as_set else {"bucket": BUCKET, "live": LIVE}
        return training_step(
            parameters, self.stage, micro_batches=self.micro_batches, width=WIDTH,
            layer=LAYER if self.checkpointing else 0, reduce_rounds=2, **limits,
        )  # fmt: skip


CASES = [
    *(Case(stage, count) for stage in range(4) for count in (1, 2)),
    Case(3, checkpointing=True),
    Case(3, as_set=True),
]


@dataclass(frozen=True)
class Row:
    """One measurement beside the formula; bytes are those that a rank sends, mean of the ranks."""

    ranks: int
    case: str
    micro_batches: int
    network: str
    sent: float
    predicted_sent: float
    seconds: float
    """Median of the steps; of each step, that of the slowest rank."""
    fastest: float
    """The fastest step: other processes may share the cores."""
    unlimited_seconds: float
    """Median without a limit of the network."""
    unlimited_fastest: float
    network_seconds: float
    """What the formula adds."""
    collectives: dict[str, int]


def main() -> None:
    """Measure, or compute."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["measured", "collectives", "model"])
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--quick", action="store_true", help="one network, one micro batch")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the namespaces are removed
    RESULTS.mkdir(parents=True, exist_ok=True)
    stored = RESULTS / "measured.json"
    counts = [int(count) for count in options.ranks.split(",")]
    single = RESULTS / "collectives.json"
    if options.part == "collectives":
        found = json.loads(single.read_text()) if single.exists() else []
        found = [row for row in found if row["ranks"] not in counts] + collectives(counts)
        single.write_text(json.dumps(found, indent=2))
        table = Table(*found[0])
        for row in found:
            table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
        Console().print(table)
        show_errors("seconds", [row["formula"] / row["seconds"] - 1 for row in found])
        return
    rows = [Row(**row) for row in json.loads(stored.read_text())] if stored.exists() else []
    if options.part == "measured":
        for ranks in counts:
            rows = [
                *(row for row in rows if row.ranks != ranks),
                *measured(ranks, quick=options.quick),
            ]
            stored.write_text(json.dumps([asdict(row) for row in rows], indent=2))
        show(rows)
        return
    communication_paper.show()
    points = {"a step": [(r.unlimited_fastest + r.network_seconds, r.fastest) for r in rows]}
    if single.exists():
        found = json.loads(single.read_text())
        points["a collective"] = [(row["formula"], row["seconds"]) for row in found]
    communication_paper.plot(points, RESULTS / "scaling-out.png")


def collectives(counts: list[int]) -> list[dict[str, Any]]:
    """Measure single collectives, of a small and a large tensor."""
    found = []
    for count in counts:
        with Network(count) as network, started(network, RANK, RESULTS) as ranks:
            for name, rounds in ROUNDS.items():
                for (label, (megabits, delay)), size in product(NETWORKS.items(), SIZES):
                    network.shape(megabits, delay)
                    answer = ranks.ask("collective", name=name, elements=size // WIDTH, count=5)
                    expected = Collectives(rounds, size)
                    link = Link(megabits * 1e6 / 8, 2 * delay)
                    row = {
                        "ranks": count, "collective": name, "network": label, "KB": size / 1e3,
                        "passes": answer["sent"] / Collectives(1, size).sent(count),
                        "seconds": median(answer["seconds"]),
                        "formula": expected.seconds(count, link),
                    }  # fmt: skip
                    print(json.dumps(row), flush=True)
                    found.append(row)
    return found


def measured(count: int, *, quick: bool) -> Iterator[Row]:
    """All cases on all networks, with this number of ranks."""
    networks = dict(list(NETWORKS.items())[:1]) if quick else NETWORKS
    with Network(count) as network, started(network, RANK, RESULTS) as ranks:
        for case in CASES:
            if quick and case.micro_batches > 1:
                continue
            network.shape(None, 0)
            built = ranks.ask("build", **case.settings)
            parameters = built["parameters"]
            step = {"method": "step", "micro_batches": case.micro_batches}
            yield from compared(case, step, case.step(parameters), network, ranks, networks)
            if case.as_set:
                weights = math.ceil(parameters / built["weights"])  # DeepSpeed gathers each alone
                sends = [gathered(parameters, width=WIDTH, bucket=weights)]
                yield from compared(case, {"method": "generate"}, sends, network, ranks, networks)


def compared(
    case: Case,
    call: dict[str, Any],
    sends: list[Collectives],
    network: Network,
    ranks: Ranks,
    networks: Mapping[str, tuple[int, float]],
) -> Iterator[Row]:
    """One call on all networks."""
    count = len(network.names)
    name = case.name if call["method"] == "step" else "gathering for a rollout"
    network.shape(None, 0)
    free = ranks.ask(**call, count=3, first=True)
    for label, (megabits, delay) in networks.items():
        if case.micro_batches > 1 and label != next(iter(networks)):
            continue
        network.shape(megabits, delay)
        found = ranks.ask(**call, count=3)
        # Gloo sends a message when the receiver has announced that it waits: a round trip.
        link = Link(megabits * 1e6 / 8, 2 * delay)
        row = Row(
            count, name, case.micro_batches, label, found["sent"], total_sent(sends, count),
            median(found["seconds"]), min(found["seconds"]),
            median(free["seconds"]), min(free["seconds"]),
            total_seconds(sends, count, link), free["collectives"],
        )  # fmt: skip
        print(json.dumps(asdict(row)), flush=True)
        yield row


def show(rows: list[Row]) -> None:
    """Print the table, and the errors."""
    titles = ("ranks", "case", "micro batches", "network", "collectives")
    compared = [
        name for what in ("MB", "seconds", "fastest") for name in (what, "formula", "error")
    ]
    table = Table(*titles, *compared, title="One optimizer step, each rank")
    errors: dict[str, list[float]] = {"MB": [], "seconds": [], "fastest": []}
    for row in rows:
        pairs = {
            "MB": (row.sent / 1e6, row.predicted_sent / 1e6),
            "seconds": (row.seconds, row.unlimited_seconds + row.network_seconds),
            "fastest": (row.fastest, row.unlimited_fastest + row.network_seconds),
        }
        cells = []
        for name, (found, predicted) in pairs.items():
            errors[name].append(predicted / found - 1)
            cells += [f"{found:.2f}", f"{predicted:.2f}", f"{errors[name][-1]:+.1%}"]
        calls = str(sum(row.collectives.values()))
        table.add_row(str(row.ranks), row.case, str(row.micro_batches), row.network, calls, *cells)
    console = Console(width=150)
    console.print(table)
    for name, own in errors.items():
        show_errors(name, own)


def show_errors(name: str, errors: list[float]) -> None:
    """Print a line with their median, 90% quantile and maximum."""
    sizes = sorted(map(abs, errors))
    Console().print(
        f"{name}: median error {median(sizes):.1%}, 9 of 10 at most "
        f"{sizes[math.ceil(0.9 * len(sizes)) - 1]:.1%}, largest {max(errors, key=abs):+.1%}"
    )


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"{time.monotonic() - began:.0f} s")
