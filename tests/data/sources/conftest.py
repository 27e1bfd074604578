from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.config.split import ColumnMap, SourceConfig
from rlhf_pipeline.data.records import Record, Unused
from rlhf_pipeline.data.sources.adapter import outcome, parser
from rlhf_pipeline.data.sources.registry import find_source

Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture
def source_rows() -> Rows:
    """A few rows of each source on the hub, in exactly the published schema."""
    return json.loads(Path(__file__).with_name("rows.json").read_text())


@pytest.fixture
def records(source_rows: Rows) -> Callable[..., list[Record | Unused]]:
    """The records of a source's adapter for rows (default: those of `source_rows`)."""

    def adapted(name: str, *rows: dict[str, Any]) -> list[Record | Unused]:
        source = find_source(SourceConfig(name=name))
        chosen = rows or tuple(source_rows[name])
        if (parse := source.parse) is None and isinstance(source.columns, ColumnMap):
            parse = parser(source.columns, strip=source.strip)
        if parse is not None:
            return [outcome(parse, row) for row in chosen]
        return [
            record
            for _, record in source.assemble((str(index), row) for index, row in enumerate(chosen))
        ]

    return adapted
