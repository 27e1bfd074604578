"""How the training programs are started. Nothing here but the number of processes can change a result."""

from __future__ import annotations

from pydantic import Field

from rlhf_pipeline.config.block import Block, operational


class LaunchConfig(Block):
    """The `deepspeed` launcher's part of the parameters."""

    processes: int | None = Field(default=None, ge=1)
    """Training processes on this machine. None: one for each GPU, or two where there is no GPU. Every global batch size
    must be a multiple of it. Part of the recipe, because the order of floating-point sums depends on it."""

    continue_from: int | None = operational(None, ge=1)
    """Ranks of earlier runs whose stages are to be found, too: finished ones are reused, an interrupted one goes on from its
    checkpoint on the ranks there are now. None: another number of ranks begins anew."""

    master_port: int | None = operational(None, ge=1024, le=65535)
    """TCP port where the ranks meet. None: a free one is picked for each launch."""

    collective_timeout_s: float = operational(1800.0, gt=0)
    """Seconds a rank waits for the others in a collective operation before the stage is ended as stuck."""

    wait: bool = operational(True)
    """Whether to wait while another run works on the same recipe, to use its result. False: refuse."""

    hang_timeout_s: float | None = operational(1500.0, gt=0)
    """Seconds without progress on any rank (a micro batch, a sampled token, a new phase) after which the stage is ended, and
    the rank that is behind is named. The ranks' start-up has five minutes in any case. 1500: longer than any one piece of
    work, and less than `collective_timeout_s`, where a rank gives up that knows itself alone. None: no watchdog."""

    halve_micro_batch_on_oom: bool = operational(False)
    """Where a rank runs out of memory, start the stage again from its newest checkpoint with all micro batch sizes
    (`micro_batch_size_per_gpu`, `sampling.batch_size_per_gpu`) halved, and so on down to 1. Global batch sizes stay, so the
    result is the same up to rounding; the manifest says what was used. A rank that the kernel killed has not said that
    memory was the reason, and does not count."""
