"""Fixtures of episodes."""

import json

import pytest
from episodes_fixtures import TOOLS, episodes

from rlhf_pipeline.episodes import loop
from rlhf_pipeline.episodes.processes import Server

_SERVERS = {}
"""Those of this worker: each imports transformers in a process for the schemas."""


def _server(*given):
    key = json.dumps(given)
    if key not in _SERVERS:
        _SERVERS[key] = Server(*given)
    return _SERVERS[key]


@pytest.fixture
def make(tokenizer, world, monkeypatch):
    """Makes the episodes of a policy; tools and environments are those of `own_tools.py`."""
    monkeypatch.syspath_prepend(str(TOOLS.parent))
    monkeypatch.setattr(loop, "Server", _server)
    return lambda **config: episodes(tokenizer, world, **config)
