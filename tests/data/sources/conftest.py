import json
from pathlib import Path

import pytest

from rlhf_pipeline.config.split import ColumnMap, SourceConfig
from rlhf_pipeline.data.sources.adapter import outcome, parser
from rlhf_pipeline.data.sources.registry import find_source


@pytest.fixture(scope="module")
def source_rows():
    """A few rows of each source on the hub, in exactly the published schema."""
    return json.loads(Path(__file__).with_name("rows.json").read_text())


@pytest.fixture
def records(source_rows):
    """The records of a source's adapter for rows (default: those of `source_rows`)."""

    def adapted(name, *rows):
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
