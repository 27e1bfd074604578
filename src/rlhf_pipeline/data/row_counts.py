import json
from collections import Counter
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from pydantic import TypeAdapter

from rlhf_pipeline.data.records import NOT_UTF8, TO_UTF8, Unused
from rlhf_pipeline.errors import DataError

_NAME = "counts.json"
_KEPT_BAD_ROWS, _SHOWN_BAD_ROWS = 5, 3


def fix_of(reason: str) -> str:
    """The fix for a file with a fault in most rows."""
    if reason == NOT_UTF8:
        return TO_UTF8
    return "correct the source's `columns` or the file: most rows are bad."


@dataclass
class RowCounts:
    """Row counts of one source."""

    rows: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    """Bad rows by reason."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Valid rows without anything to learn from, by reason."""
    first_bad: list[tuple[str, str]] = field(default_factory=list)
    """Place and reason of the first bad rows."""

    def add_unused(self, place: str, row: Unused) -> None:
        (self.bad if row.bad else self.skipped)[row.reason] += 1
        if row.bad and len(self.first_bad) < _KEPT_BAD_ROWS:
            self.first_bad.append((place, row.reason))

    def check_bad_fraction(self, max_bad_fraction: float, label: str) -> None:
        """Raise DataError if more rows are bad than allowed; the message lists the first ones."""
        bad = self.bad.total()
        # Divided, not multiplied: 0.57 * 100 is slightly less than 57.
        if bad and bad / self.rows > max_bad_fraction:
            shown = self.first_bad[:_SHOWN_BAD_ROWS]
            listed = "".join(f"\n  {place}: {reason}" for place, reason in shown)
            reason, _ = self.bad.most_common(1)[0]
            fix = (
                "correct these rows, or set split.max_bad_fraction to at least "
                f"{ceil(1_000 * bad / self.rows) / 1_000:g} to leave bad rows out."
                if 2 * bad <= self.rows and reason != NOT_UTF8
                else fix_of(reason)
            )
            raise DataError(
                f"source {label}: {bad} of {self.rows} rows are bad, more than "
                f"split.max_bad_fraction={max_bad_fraction} allows. The first bad rows:{listed}\n"
                f"Fix: {fix}"
            )

    def write(self, folder: Path) -> None:
        text = json.dumps(vars(self), indent=2, sort_keys=True)
        (folder / _NAME).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "RowCounts":
        return TypeAdapter(cls).validate_json((folder / _NAME).read_bytes())
