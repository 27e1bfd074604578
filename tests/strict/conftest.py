"""The pretend accelerator."""

import pytest
from strict_device import StrictDevice

from rlhf_pipeline.runtime import heartbeat


@pytest.fixture
def strict(world, monkeypatch):
    """The device, for one rank in this process that begins in phase `loading`."""
    monkeypatch.setattr(heartbeat, "_here", heartbeat.Heartbeat(rank=0, pid=None))
    with StrictDevice() as device:
        yield device
