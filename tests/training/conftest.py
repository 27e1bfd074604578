"""One rank in this process, for every test of training."""

import socket

import pytest
import torch

from rlhf_pipeline.training.engine import join


@pytest.fixture(scope="package")
def environment():
    """One rank's environment, with a port of its own at each use."""

    def make() -> dict[str, str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return {
            "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "DS_ACCELERATOR": "cpu",
        }  # fmt: skip

    return make


@pytest.fixture(scope="package")
def world(environment):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        yield join(0, timeout_s=60)
        torch.distributed.destroy_process_group()
