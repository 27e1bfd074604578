"""The second half of `communication.py`: 8 to 64 GPUs on paper. Nothing here was measured.

Every assumption is a constant below. Peak, memory and NVLink are those of NVIDIA's datasheets of
the H100 SXM and the A100 80GB SXM; the networks are line rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from communication_volume import (
    LIVE,
    Collectives,
    Link,
    gathered,
    total_seconds,
    total_sent,
    training_step,
)
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

UTILISATION = 0.4
"""Of the peak, by 6 operations for each weight and token; 2 of them are the forward pass."""
OF_LINE_RATE = 0.8
"""What collectives reach of the bandwidth."""
OF_HBM = 0.6
"""What generation reaches of the bandwidth of the GPU's memory; it reads all weights each token."""
IN_NODE, BETWEEN_NODES = 2e-6, 10e-6
"""Seconds of latency."""
PER_NODE = 8
ROWS, PROMPT, RESPONSE = 1024, 256, 256
"""A step: 524,288 tokens in all, as in DeepSpeed-Chat's published runs."""
MICRO_BATCH = 8192
"""Tokens of a forward pass on one GPU."""
FOR_STATES = 64e9
"""Bytes of an 80 GB GPU for weights, gradients and optimizer; the rest is for activations."""
IN_ROLLOUT = 72e9
"""Bytes for the same and the weights that generate; the rest is for keys and values."""
COUNTS = (8, 16, 32, 64)


@dataclass(frozen=True)
class GPU:
    """Datasheet figures: operations a second in bf16 without sparsity, bytes a second."""

    peak: float
    hbm: float
    nvlink: float
    """In one direction."""

    @property
    def speed(self) -> float:
        """Operations a second in training."""
        return UTILISATION * self.peak


H100, A100 = GPU(989e12, 3.35e12, 450e9), GPU(312e12, 2.04e12, 300e9)
NETWORKS = {"400 Gbit/s a GPU": 400e9, "200 Gbit/s a node": 25e9, "25 Gbit/s a node": 3.125e9}
"""Bytes a second of one node of 8 GPUs, in one direction."""


@dataclass(frozen=True)
class Model:
    """Weights of the model and of one layer."""

    parameters: int
    layer: int
    splits: bool = False
    """Whether transformers has a plan to generate by tensor parallelism; it has none for OPT."""


MODELS = {
    "OPT-1.3B": Model(1_315_758_080, 50_331_648),
    "Llama-3 8B": Model(8_030_261_248, 218_103_808, splits=True),
    "OPT-13B": Model(12_853_473_280, 314_572_800),
    "OPT-66B": Model(65_719_443_456, 1_019_215_872),
    "Llama-3 70B": Model(70_553_706_496, 855_638_016, splits=True),
    "OPT-175B": Model(174_604_455_936, 1_811_939_328),
}
CRITIC = Model(6_658_473_984, 201_326_592)
"""Critic and reward model of larger actors: OPT-6.7B; InstructGPT's had 6 billion weights."""


def link(gpu: GPU, node: float, ranks: int) -> Link:
    """The slowest link of a ring that enters and leaves each node once for each network card."""
    if ranks <= PER_NODE:
        return Link(OF_LINE_RATE * gpu.nvlink, IN_NODE)
    latency = (IN_NODE * (PER_NODE - 1) + BETWEEN_NODES) / PER_NODE
    return Link(OF_LINE_RATE * min(gpu.nvlink, node), latency)


def micro_batches(ranks: int) -> int:
    """Of one rank in a step."""
    return max(1, math.ceil(ROWS * (PROMPT + RESPONSE) / ranks / MICRO_BATCH))


def states(model: Model, stage: int, ranks: int) -> float:
    """Bytes of weights, gradients and optimizer on a GPU, in bf16 with fp32 master weights."""
    share = model.parameters / ranks
    match stage:
        case 1:
            return 4 * model.parameters + 12 * share
        case 2:
            return 2 * model.parameters + 14 * share
    return 16 * share + 2 * min(LIVE, model.parameters)


@dataclass(frozen=True)
class Step:
    """Seconds of an optimizer step on the whole batch."""

    stage: int
    compute: float
    communication: float

    @property
    def seconds(self) -> float:
        """Without overlap."""
        return self.compute + self.communication


def best_step(model: Model, gpu: GPU, node: float, ranks: int) -> Step | None:
    """The fastest ZeRO stage of those that fit; None if none fits."""
    tokens = ROWS * (PROMPT + RESPONSE) / ranks
    compute = 6 * model.parameters * tokens / gpu.speed
    steps = [
        Step(
            stage, compute, total_seconds(sends(model, stage, ranks), ranks, link(gpu, node, ranks))
        )
        for stage in (1, 2, 3)
        if states(model, stage, ranks) <= FOR_STATES
    ]
    return min(steps, key=lambda step: step.seconds, default=None)


def sends(model: Model, stage: int, ranks: int) -> list[Collectives]:
    """The collectives of an optimizer step, with gradient checkpointing."""
    return training_step(
        model.parameters, stage, micro_batches=micro_batches(ranks), layer=model.layer
    )


@dataclass(frozen=True)
class Iteration:
    """Seconds of an iteration of PPO, and how it fits."""

    how: str
    generation: float
    passes: float
    """Forward passes of four models, then training of two."""
    communication: float

    @property
    def seconds(self) -> float:
        """Without overlap."""
        return self.generation + self.passes + self.communication


def ppo(actor: Model, gpu: GPU, node: float, ranks: int) -> Iteration | None:
    """One rollout, the forward passes over it, and one optimizer step of actor and critic."""
    critic = min(actor, CRITIC, key=lambda model: model.parameters)
    fit = _fit(actor, critic, ranks)
    if fit is None:
        return None
    stage, parallel, offload = fit
    tokens, weights = ROWS * (PROMPT + RESPONSE) / ranks, actor.parameters + critic.parameters
    passes = (6 + 2 * 2) * weights * tokens / gpu.speed
    reading = 2 * actor.parameters / max(1, parallel) / (OF_HBM * gpu.hbm)
    computing = 2 * actor.parameters * ROWS / ranks / gpu.speed
    sent = sends(actor, stage, ranks) + sends(critic, stage, ranks)
    if stage == 3:
        sent += [gathered(actor.parameters, passes=1 if parallel else RESPONSE)]
        sent += [gathered(m.parameters, passes=2 * micro_batches(ranks)) for m in (actor, critic)]
    generates = {0: "at each token", 1: ""}.get(parallel, f"TP {parallel}")
    extras = (generates, "offload" * offload)
    how = ", ".join([f"ZeRO-{stage}", *filter(None, extras)])
    return Iteration(
        how, RESPONSE * max(reading, computing), passes,
        total_seconds(sent, ranks, link(gpu, node, ranks)),
    )  # fmt: skip


def _fit(actor: Model, critic: Model, ranks: int) -> tuple[int, int, bool] | None:
    """ZeRO stage, tensor parallelism of generation, and whether the optimizers are offloaded.

    Parallelism 0: the weights are gathered at each token, since a whole copy does not fit.
    """
    weights = actor.parameters + critic.parameters
    for at_each_token, offload, stage in product((False, True), (False, True), (1, 2, 3)):
        trained = states(actor, stage, ranks) + states(critic, stage, ranks)
        frozen = 2 * weights / (ranks if stage == 3 else 1)
        own = trained + frozen - 12 * weights / ranks * offload
        if own > FOR_STATES:
            continue
        if stage < 3:
            return stage, 1, offload
        if at_each_token:
            return stage, 0, offload
        for parallel in (1, 2, 4, 8) if actor.splits else (1,):
            if own + 2 * actor.parameters / parallel <= IN_ROLLOUT:
                return stage, parallel, offload
    return None


def break_even(gpu: GPU, node: float, ranks: int, stage: int) -> float:
    """Tokens per GPU and micro batch at which sending takes as long as computing, for OPT-13B."""
    model = MODELS["OPT-13B"]
    sent = training_step(model.parameters, stage, layer=model.layer)
    seconds = total_seconds(sent, ranks, link(gpu, node, ranks))
    return seconds * gpu.speed / (6 * model.parameters)


def show() -> None:
    """Print all tables."""
    console, many = Console(width=140), COUNTS[-1]
    volumes = Table(
        *("model", "ZeRO-0, fp32", "ZeRO-1", "ZeRO-2", "ZeRO-3", "rollout"),
        title=f"GB that each of {many} GPUs sends: a step of one micro batch",
    )
    for name, model in MODELS.items():
        own = [
            training_step(model.parameters, s, layer=model.layer, width=2 if s else 4)
            for s in range(4)
        ] + [[gathered(model.parameters)]]  # fmt: skip
        volumes.add_row(name, *(f"{total_sent(each, many) / 1e9:,.1f}" for each in own))
    console.print(volumes)
    even = Table(
        *("GPU", "network", "GPUs", "ZeRO-1", "ZeRO-2", "ZeRO-3"),
        title="Tokens per GPU and step of one micro batch: sending = computing",
    )
    links = {"NVLink": (NETWORKS["400 Gbit/s a GPU"], PER_NODE)}
    links |= {network: (node, many) for network, node in NETWORKS.items()}
    for kind, gpu in (("H100", H100), ("A100", A100)):
        for network, (node, ranks) in links.items():
            own_tokens = [f"{break_even(gpu, node, ranks, stage):,.0f}" for stage in (1, 2, 3)]
            even.add_row(kind, network, str(ranks), *own_tokens)
    console.print(even)
    title = "Seconds of a training step on H100s (ZeRO stage; share of computing)"
    training = Table("model", "network", *map(str, COUNTS), title=title)
    title = "Seconds of an iteration of PPO on H100s (how it fits; share of sending)"
    iterations = Table("actor", "network", *map(str, COUNTS), title=title)
    for name, model in MODELS.items():
        for network, node in NETWORKS.items():
            steps = [best_step(model, H100, node, ranks) for ranks in COUNTS]
            training.add_row(name, network, *(
                f"{s.seconds:.2f} ({s.stage}; {s.compute / s.seconds:.0%})" if s else "-"
                for s in steps
            ))  # fmt: skip
            found = [ppo(model, H100, node, ranks) for ranks in COUNTS]
            iterations.add_row(name, network, *(
                f"{i.seconds:.0f} ({i.how}; {i.communication / i.seconds:.0%})" if i else "-"
                for i in found
            ))  # fmt: skip
    console.print(training)
    console.print(iterations)


def plot(points: Mapping[str, Sequence[tuple[float, float]]], file: Path) -> None:
    """Left: predicted and measured seconds. Right: efficiency by tokens between reductions."""
    figure, (checked, paper) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, own in points.items():
        checked.plot(*zip(*own, strict=True), "o", markersize=3, label=name)
    if together := [pair for own in points.values() for pair in own]:
        ends = [f(f(pair) for pair in together) for f in (min, max)]
        checked.plot(ends, ends, color="grey", linewidth=0.8)
        checked.legend()
    checked.set(xscale="log", yscale="log", xlabel="seconds, formula", ylabel="seconds, measured")
    checked.set_title("2 to 8 processes, simulated network", fontsize=10)
    tokens = [2**power for power in range(9, 19)]
    for network, node in NETWORKS.items():
        even = break_even(H100, node, COUNTS[-1], 3)
        paper.plot(tokens, [own / (own + even) for own in tokens], label=network)
    paper.set(xscale="log", ylim=(0, 1), xlabel="tokens per GPU between reductions")
    paper.set_ylabel("share of computing")
    paper.set_xticks([1e3, 1e4, 1e5])
    paper.set_title("64 H100s on paper, without overlap", fontsize=10)
    paper.legend(loc="upper left", fontsize=8)
    paper.grid(alpha=0.3)
    figure.savefig(file, dpi=100)
