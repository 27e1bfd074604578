"""How training programs are launched. Only `processes` can change a result."""

from pydantic import Field

from rlhf_pipeline.config.block import Block, operational


class LaunchConfig(Block):
    """Parameters of the `deepspeed` launcher."""

    processes: int | None = Field(default=None, ge=1)
    """Number of ranks (training processes) on this machine. Every global batch size must be a
    multiple of it. It is part of the recipe, because it changes the order of floating-point sums.
    None: one per GPU, or two without a GPU."""
    continue_from: int | None = operational(None, ge=1)
    """Number of ranks of earlier runs: their finished stages are reused, and an unfinished stage
    resumes from its checkpoint on the present ranks. None: another number of ranks starts anew."""
    master_port: int | None = operational(None, ge=1024, le=65535)
    """TCP port for the rendezvous of the ranks. None: a free port for each launch."""
    collective_timeout_s: float = operational(1800.0, gt=0)
    """Seconds that a rank waits for the others in a collective operation before the stage fails."""
    wait: bool = operational(True)
    """If another run executes the same recipe, wait and reuse its result. False: fail."""
    hang_timeout_s: float | None = operational(1500.0, gt=0)
    """Seconds without progress on any rank (micro batch, sampled token or new phase) until the
    stage fails with the name of the slow rank. The ranks have at least five minutes to start. Keep
    it below `collective_timeout_s`, which reports less. None: no watchdog."""
    grace_s: float = operational(120.0, ge=0)
    """Seconds that the ranks have, after SIGTERM or Ctrl-C to `kedro run`, to finish their step and
    write a checkpoint before they are killed. The time starts anew whenever a rank makes progress
    in writing. A second Ctrl-C kills them at once. A scheduler must wait longer
    (docs/troubleshooting.md)."""
    halve_micro_batch_on_oom: bool = operational(False)
    """When a rank runs out of memory, halve all micro batch sizes (`micro_batch_tokens`,
    `sampling.batch_size_per_gpu`) and resume from the newest checkpoint, repeatedly down to 1 or
    to the longest row, which is never cut. Global batch sizes do not change, so the result is equal
    up to rounding. The manifest records the sizes. A rank killed by the kernel does not count as
    out of memory."""
