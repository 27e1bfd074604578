"""`kedro rlhf label` before it serves."""

import json
import socket

import pytest
from kedro.io import DataCatalog, MemoryDataset

from rlhf_pipeline.commands.label import evaluation_of, label
from rlhf_pipeline.errors import ConfigError, DataError


@pytest.fixture
def catalog(tmp_path):
    return DataCatalog({"workspace": MemoryDataset(tmp_path / "data" / "07_workspace")})


@pytest.fixture
def serve(catalog, tmp_path):
    """Calls the command for one pair at some port."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "Q?", "first": "a", "second": "b"}))

    def serve(port, output=None):
        label(catalog, tmp_path, None, str(pairs), output, "127.0.0.1", port)

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


def test_the_folder_of_an_evaluation_stands_for_itself(catalog, tmp_path):
    (tmp_path / "answers.jsonl").touch()
    assert evaluation_of(str(tmp_path), catalog, tmp_path, tmp_path) == tmp_path
