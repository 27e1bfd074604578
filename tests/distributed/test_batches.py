"""The rows of steps, ranks and micro batches."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch

from rlhf_pipeline.distributed import batches
from rlhf_pipeline.distributed.batches import grouped, load_rows, minibatch_rows, step_rows
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.forward import Capabilities


def world(rank: int, size: int) -> World:
    return World(rank, size, torch.device("cpu"))


def test_each_pass_visits_every_row_once():
    stream = np.concatenate(
        [step_rows(10, 4, step, seed=1) for step in range(5)]
    )  # 20 rows: two passes
    assert sorted(stream[:10]) == list(range(10)) == sorted(stream[10:])
    assert stream[:10].tolist() != stream[10:].tolist()


def test_the_rows_of_a_step_depend_on_step_seed_and_stream_only():
    keys = [(1, 0), (1, 1), (1, 2), (2, 0)]
    orders = [step_rows(10, 10, 3, seed, stream=stream).tolist() for seed, stream in keys]
    assert orders[0] == step_rows(10, 10, 3, seed=1).tolist()
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_minibatch_contains_the_same_rows_for_any_number_of_ranks(ranks):
    """Three minibatches of four rows; column c has the rows c, c + 4 and c + 8.

    So the shares of all ranks make up the batch.
    """
    rows = np.arange(12)
    whole = minibatch_rows(12, 4, world(0, 1), (7, 1, 2))
    assert (np.sort(whole, axis=0) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]).all()
    assert (whole[:, 0] // 4).tolist() != (whole[:, 1] // 4).tolist()  # columns are independent
    shares = [
        batches.own_share(rows, world(rank, ranks))[
            minibatch_rows(12, 4, world(rank, ranks), (7, 1, 2))
        ]
        for rank in range(ranks)
    ]
    for number, minibatch in enumerate(whole):
        assert sorted(minibatch) == sorted(np.concatenate([share[number] for share in shares]))


def test_each_pass_over_a_rollout_draws_its_minibatches():
    """From seed, step and epoch alone."""
    keys = [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)]
    drawn = {str(minibatch_rows(32, 8, world(0, 1), key).tolist()) for key in keys}
    assert len(drawn) == 4
    assert str(minibatch_rows(32, 8, world(0, 1), (1, 1, 2)).tolist()) in drawn
    assert minibatch_rows(8, 8, world(0, 1), (1, 1, 1)).tolist() == [list(range(8))]


def write(path, count, batch=None):
    table = pa.table(
        {"id": [str(i) for i in range(count)], "prompt_ids": [[i, i] for i in range(count)]}
    )
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, batch)
    return path


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 65, 1000])
def test_every_number_is_at_one_position_of_a_shuffled_range(count):
    assert sorted(batches.shuffled(np.arange(count), count, (1, 2, 3))) == list(range(count))


def test_every_order_is_about_equally_frequent():
    orders = Counter(tuple(batches.shuffled(np.arange(4), 4, (seed,))) for seed in range(4800))
    assert len(orders) == 24
    assert 140 < min(orders.values()) <= max(orders.values()) < 260  # 200 each, 4 deviations


def test_a_large_range_is_shuffled_evenly_without_an_array_of_it():
    count = 10**12
    numbers = batches.shuffled(np.arange(20_000), count, (5,))
    assert len(set(numbers.tolist())) == 20_000
    assert numbers.min() >= 0 and numbers.max() < count
    tenths = np.bincount(numbers * 10 // count, minlength=10)
    assert 1800 < tenths.min() <= tenths.max() < 2200
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_a_sample_comes_from_the_whole_table():
    assert batches.sampled_rows(10, 20, seed=1).tolist() == list(range(10))
    sample = batches.sampled_rows(1000, 100, seed=1)
    assert sample.tolist() == sorted(set(sample.tolist())) and len(sample) == 100
    assert 30 < (sample < 500).sum() < 70
    assert sample.tolist() != batches.sampled_rows(1000, 100, seed=2).tolist()


@pytest.mark.parametrize(("size", "parts"), [(None, 1), (3, 4)])
def test_rows_come_in_the_asked_order_from_all_batches_of_a_table(tmp_path, size, parts):
    table = load_rows(write(tmp_path / "t.arrow", 10, size), world(0, 2))
    assert (table.num_rows, len(table.batches)) == (10, parts)
    rows = [9, 0, 3, 2, 5, 3]
    assert table.columns(np.array(rows)) == {
        "id": [str(row) for row in rows],
        "prompt_ids": [[row, row] for row in rows],
    }


def own_memory():
    """Bytes of this process, without the pages of mapped files, which the system can drop."""
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path):
    """Ten million rows, read as training reads them: only the rows of a step are copied."""
    path, count = tmp_path / "large.arrow", 10**7
    schema = pa.schema({"prompt_ids": pa.list_(pa.int32())})
    offsets = pa.array(np.arange(0, 4 * 10**5 + 1, 4, dtype=np.int32))
    values = pa.ListArray.from_arrays(offsets, pa.array(np.arange(4 * 10**5, dtype=np.int32)))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for _ in range(count // 10**5):
            writer.write_batch(pa.record_batch([values], schema=schema))
    before, pool = own_memory(), pa.total_allocated_bytes()
    table = load_rows(path, world(0, 1))
    for step in range(50):
        rows = step_rows(count, 64, step, seed=1)
        first = [ids[0] for ids in table.columns(rows)["prompt_ids"]]
        assert first == (rows % 10**5 * 4).tolist()
    assert pa.total_allocated_bytes() - pool < 2**20
    assert own_memory() - before < 16 * 2**20


def test_a_table_with_fewer_rows_than_ranks_is_rejected(tmp_path):
    message = r"t\.arrow: found 1 rows, expected at least 2, one for each rank"
    with pytest.raises(ArtifactError, match=message):
        load_rows(write(tmp_path / "t.arrow", 1), world(0, 2))


LENGTHS = torch.tensor([[[9, 0]], [[0, 1]], [[5, 0]], [[0, 2]], [[8, 0]]])
PAIRS = torch.tensor([[[3, 9], [3, 1]], [[2, 1], [2, 9]]])
"""Two pairs; padded they are 4 sequences of 3 + 9 tokens."""


def lists(groups):
    return [group.tolist() for group in groups]


@pytest.mark.parametrize(
    ("lengths", "tokens", "padded", "expected"),
    [
        (LENGTHS, 10, False, [[0], [4], [2, 3, 1]]),
        (LENGTHS, 14, True, [[0], [4], [2, 3], [1]]),
        (LENGTHS, 17, False, [[0, 4], [2, 3, 1]]),
        (LENGTHS, 18, True, [[0, 4], [2, 3], [1]]),
        (LENGTHS, 21, True, [[0, 4], [2, 3, 1]]),
        (LENGTHS, 1, False, [[0], [4], [2], [3], [1]]),
        (LENGTHS, 1000, True, [[0, 4, 2, 3, 1]]),
        (PAIRS, 47, True, [[0], [1]]),
        (PAIRS, 48, True, [[0, 1]]),
        (PAIRS, 30, False, [[0, 1]]),
    ],
)
def test_groups_are_filled_from_the_longest_row_to_the_shortest(lengths, tokens, padded, expected):
    """Padding counts if the model computes it.

    Rows 2, 3 and 1 have a prompt of 5 and responses of 2 and 1: padded they are 3 rows of 5 + 2.
    """
    assert lists(grouped(lengths, tokens, padded=padded)) == expected


def test_no_padded_group_exceeds_the_budget():
    """Responses are padded beside prompts: prompts of 255 and responses of 255 are 510 wide."""
    torch.manual_seed(0)
    prompts, responses = torch.randint(20, 256, (512,)), torch.randint(4, 256, (512,))
    groups = grouped(torch.stack([prompts, responses], 1)[:, None], 4096, padded=True)
    sizes = [len(rows) * int(prompts[rows].max() + responses[rows].max()) for rows in groups]
    assert max(sizes) <= 4096 and min(map(len, groups)) > 1
    assert sorted(torch.cat(groups).tolist()) == [*range(512)]
    assert lists(grouped(torch.tensor([[[3, 40]], [[40, 3]]]), 50, padded=True)) == [[0], [1]]


def test_groups_of_most_rows_are_split():
    groups = grouped(LENGTHS, 1000, padded=False)
    assert lists(batches.split(groups, 2)) == [[0, 4, 2], [3, 1]]
    assert lists(batches.split(groups, 4)) == [[0], [4], [2], [3, 1]]
    assert lists(batches.split(groups, 5)) == [[0], [4], [2], [3], [1]]


def test_all_ranks_make_as_many_groups_as_the_rank_with_the_most(monkeypatch):
    monkeypatch.setattr(batches, "probe_capabilities", lambda model: Capabilities(True, None))
    world = SimpleNamespace(most=lambda counts: [max(counts[0], 4), max(counts[1], 1)])
    first, second = batches.micro_batches([LENGTHS, LENGTHS[:2]], 17, None, world)
    assert lists(first) == [[0], [4], [2, 3], [1]]
    assert lists(second) == [[0, 1]]
