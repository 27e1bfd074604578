"""How many of a source's rows could be used, and why the others could not."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.errors import DataError

_NAME = "counts.json"
_SHOWN_BAD_ROWS = 5


@dataclass
class RowCounts:
    """Counts of one source."""

    rows: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    """Broken rows by reason."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """Sound rows that hold nothing to learn from, by reason."""
    first_bad: list[tuple[str, str]] = field(default_factory=list)
    """Place and reason of the first broken rows."""

    def add_unused(self, place: str, row: Unused) -> None:
        """Count a row that yields no record."""
        (self.bad if row.bad else self.passed_over)[row.reason] += 1
        if row.bad and len(self.first_bad) < _SHOWN_BAD_ROWS:
            self.first_bad.append((place, row.reason))

    def refuse_beyond(self, max_bad_fraction: float, label: str) -> None:
        """DataError where more rows are bad than allowed; it names the first ones."""
        bad = self.bad.total()
        if (
            bad and bad / self.rows > max_bad_fraction
        ):  # not multiplied: 0.57 * 100 is a little less than 57
            listed = "".join(f"\n  {place}: {reason}" for place, reason in self.first_bad)
            raise DataError(
                f"source {label}: {bad} of {self.rows} rows are unusable, more than "
                f"split.max_bad_fraction={max_bad_fraction} allows. The first of them:{listed}\n"
                "Correct these rows, or set split.max_bad_fraction to at least "
                f"{ceil(1_000 * bad / self.rows) / 1_000:g} to leave such rows out."
            )

    def write(self, folder: Path) -> None:
        """Store the counts beside a source's records."""
        (folder / _NAME).write_text(
            json.dumps(vars(self), indent=2, sort_keys=True), encoding="utf-8"
        )

    @classmethod
    def read(cls, folder: Path) -> RowCounts:
        """The counts of a source's records."""
        fields = json.loads((folder / _NAME).read_text(encoding="utf-8"))
        return cls(
            fields["rows"],
            Counter(fields["bad"]),
            Counter(fields["passed_over"]),
            [(place, reason) for place, reason in fields["first_bad"]],
        )
