"""The pretend accelerator."""

import pytest
from strict_device import StrictDevice


@pytest.fixture
def strict(world):
    """The device, for one rank in this process."""
    with StrictDevice() as device:
        yield device
