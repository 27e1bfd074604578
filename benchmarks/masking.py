"""How the time to mask secrets grows with the length of a text: ten times longer, ten times slower.

    python benchmarks/masking.py

The texts are those with which a pattern could search from every character to the end. The exit code
is 1 if a text that is ten times as long takes more than twenty times as long.
"""

from __future__ import annotations

import time
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from rlhf_pipeline.errors import without_secrets

TEXTS = ("a", "a.", "a://", "a:a@", "://a:", "https://h/p?", "s3://k:v@h/ ")
LENGTHS = (10_000, 100_000, 1_000_000)


def main() -> int:
    """Print a row for each repeated text."""
    table = Table(title="Seconds to mask a text of a repeated part, by its characters")
    for column in ("part", *(f"{length:,}" for length in LENGTHS), "growth at most"):
        table.add_column(column, justify="right")
    largest = 0.0
    for text in TEXTS:
        times = [seconds(text * (length // len(text))) for length in LENGTHS]
        growth = max(after / before for before, after in pairwise(times))
        table.add_row(repr(text), *(f"{each:.4f}" for each in times), f"{growth:.1f}")
        largest = max(largest, growth)
    Console(width=100).print(table)
    return int(largest > 20)


def seconds(text: str) -> float:
    """The fastest of five runs, in seconds of the processor."""
    found = []
    for _ in range(5):
        start = time.process_time()
        without_secrets(text)
        found.append(time.process_time() - start)
    return min(found)


if __name__ == "__main__":
    raise SystemExit(main())
