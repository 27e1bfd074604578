"""Freed memory goes back to the operating system."""

import psutil
import torch

from rlhf_pipeline.distributed.engine import release_freed


def test_freed_blocks_between_blocks_in_use_are_returned():
    """Blocks of 100 kB are never mapped one by one, so those in use pin the heap between them."""
    blocks = [torch.ones(25_000) for _ in range(2_000)]
    full = psutil.Process().memory_info().rss
    kept, blocks = blocks[::10], None
    release_freed()
    returned = full - psutil.Process().memory_info().rss
    assert len(kept) == 200
    assert returned > 0.7 * 1_800 * 100_000
