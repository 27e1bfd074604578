from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.data.source import MODULES, find_source
from rlhf_pipeline.data.sources import lookup
from rlhf_pipeline.errors import ConfigError


@pytest.mark.parametrize("name", MODULES)
def test_each_source_is_found_by_its_own_name(name: str) -> None:
    source = find_source(name)
    assert source.name == name
    assert source.description
    ways = (source.parse, source.parser, source.assemble, source.generate)
    assert sum(way is not None for way in ways) == 1


def test_each_module_with_sources_is_registered() -> None:
    folder = Path(lookup.__file__).parent
    declared = {path.stem for path in folder.glob("*.py") if "\nSOURCES = (" in path.read_text()}
    assert declared == {module.rpartition(".")[2] for module in MODULES.values()}


HUB = [name for name in MODULES if name not in ("synthetic", "files", "local/jsonfile")]


def test_the_example_rows_cover_every_source_of_the_hub(source_rows) -> None:
    assert sorted(source_rows) == sorted(HUB)


@pytest.mark.parametrize("name", HUB)
def test_the_declared_columns_are_published(source_rows, name: str) -> None:
    assert all(set(find_source(name).columns) <= row.keys() for row in source_rows[name])


@pytest.mark.parametrize("name", HUB)
def test_the_declared_columns_are_enough(records, source_rows, name: str) -> None:
    columns = find_source(name).columns
    reduced = [{column: row[column] for column in columns} for row in source_rows[name]]
    assert records(name, *reduced) == records(name)


@pytest.mark.parametrize(
    ("name", "column"), [(name, column) for name in HUB for column in find_source(name).columns]
)
def test_each_declared_column_is_needed(records, source_rows, name: str, column: str) -> None:
    rows = [
        {key: value for key, value in row.items() if key != column} for row in source_rows[name]
    ]
    assert Unused(f"column {column!r} is missing") in records(name, *rows)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("antropic/HH-rlhf", "Anthropic/hh-rlhf"), ("sintetic", "synthetic"), ("file", "files")],
)
def test_a_misspelt_name_gets_a_suggestion(name: str, nearest: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"unknown source '{name}' \(did you mean {nearest}\?\)"
    ) as error:
        find_source(name)
    assert all(known in str(error.value) for known in MODULES)


def test_an_unfamiliar_name_gets_no_suggestion() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown source 'zzz'; the sources are .*Anthropic/hh-rlhf"
    ):
        find_source("zzz")


def test_the_adapters_import_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from rlhf_pipeline.data.source import MODULES, find_source\n"
        "assert all(find_source(name).name == name for name in MODULES)\n"
        "heavy = {'datasets', 'deepspeed', 'kedro', 'mlflow', 'numpy', 'pandas', 'pyarrow', "
        "'torch', 'transformers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
