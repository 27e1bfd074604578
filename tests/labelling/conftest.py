"""Pairs made by hand, and servers of the page in this process."""

import socket
import threading
from contextlib import ExitStack

import pytest
import uvicorn
from waiting import wait_until

from rlhf_pipeline.labelling.server import application
from rlhf_pipeline.labelling.votes import distinct_pairs


def rows(count, **columns):
    """Rows of pairs with different prompts."""
    return [
        {"prompt": f"Question {n}?", "first": f"One {n}.", "second": f"Two {n}."} | columns
        for n in range(count)
    ]


@pytest.fixture
def pairs():
    """Makes pairs from rows, or so many."""
    return lambda given: distinct_pairs(rows(given) if isinstance(given, int) else given)[0]


@pytest.fixture
def votes(tmp_path):
    """The file of votes."""
    file = tmp_path / "votes.jsonl"
    file.touch()
    return file


@pytest.fixture
def serve():
    """Starts a server of pairs and a file of votes; returns its address."""
    with ExitStack() as cleanup:

        def start(pairs, file):
            listener = socket.create_server(("127.0.0.1", 0))
            app = application(pairs, file, "127.0.0.1")
            server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            cleanup.callback(thread.join)
            cleanup.callback(setattr, server, "should_exit", True)
            wait_until(lambda: server.started)
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield start
