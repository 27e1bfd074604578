from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.data.records import Record, Unused
from rlhf_pipeline.data.sources.adapter import outcome
from rlhf_pipeline.data.sources.lookup import find_source

Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture
def source_rows() -> Rows:
    """Of each source with a hub repository a few rows in exactly the published schema, with every column."""
    return json.loads(Path(__file__).with_name("rows.json").read_text())


@pytest.fixture
def records(source_rows: Rows) -> Callable[..., list[Record | Unused]]:
    """What a source's adapter makes of rows (of `source_rows`, where none are given)."""

    def adapted(name: str, *rows: dict[str, Any]) -> list[Record | Unused]:
        source = find_source(name)
        chosen = rows or tuple(source_rows[name])
        if source.parse is not None:
            return [outcome(source.parse, row) for row in chosen]
        return [
            record
            for _, record in source.assemble((str(index), row) for index, row in enumerate(chosen))
        ]

    return adapted
