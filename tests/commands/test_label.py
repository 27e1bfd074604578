"""`kedro rlhf label` before it serves."""

import json
import socket

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from kedro.io import DataCatalog, MemoryDataset

from rlhf_pipeline.commands.label import label
from rlhf_pipeline.data.records import Message
from rlhf_pipeline.errors import ConfigError, DataError

ROWS = pa.table({"prompt": ["One?", "Two?"], "first": ["a", "c"], "second": ["b", "d"]})


@pytest.fixture
def catalog(tmp_path):
    return DataCatalog({"workspace": MemoryDataset(tmp_path / "data" / "07_workspace")})


@pytest.fixture
def serve(catalog, tmp_path):
    """Calls the command for one pair at some port."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "Q?", "first": "a", "second": "b"}))

    def serve(port, output=None):
        label.callback(catalog, tmp_path, None, str(pairs), output, "127.0.0.1", port)

    return serve


def test_a_port_in_use_is_named(serve, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"found 127\.0\.0\.1:{port} unusable \(Address"):
            serve(port)
    assert (tmp_path / "data" / "01_raw" / "votes.jsonl").read_bytes() == b""


def test_a_file_of_something_else_is_not_taken_for_votes(serve, tmp_path):
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: found no vote"):
        file = tmp_path / "other" / "pairs.jsonl"
        file.parent.mkdir()
        file.write_text((tmp_path / "pairs.jsonl").read_text() + "\n")
        serve(0, str(file))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("pairs.csv", lambda file: pa.csv.write_csv(ROWS, file)),
        ("pairs.parquet", lambda file: pa.parquet.write_table(ROWS, file)),
        ("pairs.json", lambda file: file.write_text(json.dumps(ROWS.to_pylist()))),
    ],
)
def test_pairs_come_from_files_of_other_formats(
    catalog, tmp_path, monkeypatch, capsys, name, write
):
    pairs = []

    def application(found, *_):
        pairs.extend(found)

    monkeypatch.setattr("rlhf_pipeline.commands.label.application", application)
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    write(tmp_path / name)
    label.callback(catalog, tmp_path, None, str(tmp_path / name), None, "127.0.0.1", 0)
    assert "pairs  2\n" in capsys.readouterr().out
    assert [(pair.prompt, pair.first, pair.second) for pair in pairs] == [
        ((Message("user", "One?"),), "a", "b"),
        ((Message("user", "Two?"),), "c", "d"),
    ]
