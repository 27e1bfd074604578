"""`kedro rlhf label` before it serves."""

import json
import socket

import pytest
from kedro.io import DataCatalog, MemoryDataset

from rlhf_pipeline.commands.serve import label
from rlhf_pipeline.data.records import Message
from rlhf_pipeline.errors import ConfigError, DataError
from rlhf_pipeline.kedro_run.artifacts import Ledger


@pytest.fixture
def ledger(tmp_path):
    workspace = MemoryDataset(tmp_path / "data" / "07_workspace")
    return Ledger(DataCatalog({"workspace": workspace}), tmp_path)


@pytest.fixture
def serve(ledger, tmp_path):
    """Calls the command for one pair at some port."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "Q?", "first": "a", "second": "b"}))

    def serve(port, output=None):
        label.callback(ledger, None, str(pairs), output, "127.0.0.1", port)

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


def test_pairs_come_from_a_file_of_any_format(ledger, tmp_path, monkeypatch, capsys):
    pairs = []
    monkeypatch.setattr(
        "rlhf_pipeline.labelling.server.application", lambda found, *_: pairs.extend(found)
    )
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    file = tmp_path / "pairs.csv"
    file.write_text("prompt,first,second\nOne?,a,b\nTwo?,c,d\n")
    label.callback(ledger, None, str(file), None, "127.0.0.1", 0)
    assert "pairs  2\n" in capsys.readouterr().out
    assert [(pair.prompt, pair.first, pair.second) for pair in pairs] == [
        ((Message("user", "One?"),), "a", "b"),
        ((Message("user", "Two?"),), "c", "d"),
    ]
