"""The rows of each step and each rank."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from rlhf_pipeline.distributed.batches import columns, load_rows, own_share, step_rows
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import ArtifactError


def world(rank: int, size: int) -> World:
    return World(rank, size, torch.device("cpu"))


def test_each_pass_visits_every_row_once():
    stream = np.concatenate(
        [step_rows(10, 4, step, seed=1) for step in range(5)]
    )  # 20 rows: two passes
    assert sorted(stream[:10]) == list(range(10)) == sorted(stream[10:])
    assert stream[:10].tolist() != stream[10:].tolist()


def test_the_rows_of_a_step_depend_on_step_and_seed_only():
    assert step_rows(10, 4, 3, seed=1).tolist() == step_rows(10, 4, 3, seed=1).tolist()
    assert step_rows(10, 4, 3, seed=1).tolist() != step_rows(10, 4, 3, seed=2).tolist()


def test_streams_of_one_seed_have_different_orders():
    first = [step_rows(10, 10, 0, seed=1, stream=stream).tolist() for stream in (0, 1, 2)]
    assert first[0] == step_rows(10, 10, 0, seed=1).tolist()
    assert len({tuple(order) for order in first}) == 3


def test_the_shares_of_all_ranks_make_up_the_batch():
    rows = np.arange(8)
    shares = [own_share(rows, world(rank, 4)) for rank in range(4)]
    assert sorted(np.concatenate(shares)) == rows.tolist()


def test_a_minibatch_contains_the_same_rows_for_any_number_of_ranks():
    """Block k of all ranks together is block k of the global batch."""
    rows = np.arange(16)
    for size in (1, 2, 4):
        blocks = [own_share(rows, world(rank, size)).reshape(2, -1) for rank in range(size)]
        assert sorted(np.concatenate([block[1] for block in blocks])) == list(range(8, 16))


def write(path, count):
    table = pa.table(
        {"id": [str(i) for i in range(count)], "prompt_ids": [[i, i] for i in range(count)]}
    )
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def test_columns_have_the_order_of_the_rows(tmp_path):
    table = load_rows(write(tmp_path / "t.arrow", 5), world(0, 2))
    assert columns(table, np.array([3, 1])) == {"id": ["3", "1"], "prompt_ids": [[3, 3], [1, 1]]}


def test_a_table_with_fewer_rows_than_ranks_is_rejected(tmp_path):
    with pytest.raises(
        ArtifactError, match=r"t\.arrow: found 1 rows, expected at least 2, one for each rank"
    ):
        load_rows(write(tmp_path / "t.arrow", 1), world(0, 2))
