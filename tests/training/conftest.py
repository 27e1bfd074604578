"""One rank in this process, for every test of training."""

import socket

import pytest
import torch

from rlhf_pipeline.training.engine import join


@pytest.fixture(scope="package")
def world():
    with socket.socket() as probe, pytest.MonkeyPatch.context() as patch:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
        probe.close()
        for name, value in {
            "RANK": 0,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": 1,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }.items():
            patch.setenv(name, str(value))
        patch.setenv("DS_ACCELERATOR", "cpu")
        yield join(0, timeout_s=60)
        torch.distributed.destroy_process_group()
