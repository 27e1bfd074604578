"""What this machine offers to a launch: processes, GPUs, a free port."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ConfigError


def process_count(config: LaunchConfig, gpus: int) -> int:
    """Ranks on this machine: `launch.processes` if set, else one per GPU, or two without a GPU."""
    return config.processes or gpus or 2


def gpu_count() -> int:
    """GPUs that a launched program may use, counted without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listing.stdout.count("GPU ") if listing.returncode == 0 else 0


def free_port(configured: int | None) -> int:
    """The configured port, or any free one.

    Raises:
        ConfigError: the configured port is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", configured or 0))
        except OSError:
            raise ConfigError(
                f"launch.master_port: port {configured} is in use. Fix: set another port, or null "
                "to pick a free one"
            ) from None
        return int(probe.getsockname()[1])
