"""The most memory that log-probabilities need, forward and backward, beside all logits at once.

    python benchmarks/logprob_memory.py
    python benchmarks/logprob_memory.py --vocabulary=151936 --positions=4096 --width=1024

Each line is the most memory beyond that of the weight, its gradient and the hidden states, measured
in a process of its own. Without a GPU it is the growth of the process's memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlhf_pipeline.rl.logprobs import CHUNK, logprobs_and_entropy, logprobs_of

Head = tuple[Tensor, Tensor | None]


def chunked(hidden: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """This project's."""
    return logprobs_of(hidden, ids, head=(weight, None))


def chunked_with_entropy(hidden: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """This project's, as PPO's actor uses it."""
    return logprobs_and_entropy(hidden, ids, head=(weight, None))[0]


def all_logits(hidden: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """The usual code."""
    logits = (hidden @ weight.T).float()
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "chunks": chunked,
    "chunks, with entropy": chunked_with_entropy,
    "all logits": all_logits,
}


def main() -> None:
    """Measure each way in a process of its own; print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way is not None:
        print(measure(WAYS[given.way], given.vocabulary, given.positions, given.width))
        return
    table = Table(title=f"{given.positions} positions, {given.vocabulary} tokens, fp32")
    for column in ("", "GB", "of hidden states and one chunk"):
        table.add_column(column, justify="right")
    unit = 4 * (given.positions * given.width + CHUNK)
    for way in WAYS:
        found = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], f"--way={way}"],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        peak = float(found.stdout)
        table.add_row(way, f"{peak / 1e9:.2f}", f"{peak / unit:.2f}")
    Console().print(table)


def measure(
    way: Callable[[Tensor, Tensor, Tensor], Tensor], vocabulary: int, positions: int, width: int
) -> float:
    """The most bytes during a forward and a backward pass, besides weight and gradients."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.randn(vocabulary, width, device=device).mul_(0.02).requires_grad_()
    hidden = torch.randn(1, positions, width, device=device).requires_grad_()
    ids = torch.randint(vocabulary, (1, positions), device=device)
    weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)
    way(hidden[:, :2], ids[:, :2], weight).sum().backward()  # allocates what stays
    peak = Peak(device)
    way(hidden, ids, weight).sum().backward()
    return peak.bytes() - weight.nbytes  # its new gradient, before it is added to the old one


class Peak:
    """The growth of the memory from now on."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._done = False
        self._most = 0
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        self._process = psutil.Process()
        self._before = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done:
            self._most = max(self._most, self._process.memory_info().rss)
            time.sleep(0.002)

    def bytes(self) -> int:
        """The most bytes beyond those at the beginning."""
        if self._cuda:
            return torch.cuda.max_memory_allocated() - self._before
        self._done = True
        self._thread.join()
        return self._most - self._before


if __name__ == "__main__":
    main()
