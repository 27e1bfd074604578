"""Training that is saved, loaded and continued equals uninterrupted training, at every ZeRO stage.

It also continues on other numbers of ranks and at other stages. Real ranks run this file as a
program under DeepSpeed's launcher, all settings in one launch.
"""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rlhf_pipeline.distributed import engine_state
from rlhf_pipeline.distributed.engine_state import write_tensors
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.digests import FileEntry, file_digest
from rlhf_pipeline.runtime.heartbeat import Heartbeat


def test_safetensors_reads_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_state, "PIECE", 8)
    monkeypatch.setattr(heartbeat, "_here", Heartbeat(0, None))
    tensors = {
        "weight|a": torch.tensor([[1.0, -2.0, 3.0], [float("nan"), float("inf"), -0.0]]),
        "weight|none": torch.empty(0),
        "a transposed matrix": torch.arange(6.0).view(2, 3).t(),
    }
    entry = write_tensors(tmp_path / "file", tensors, {"a": "12"})
    assert entry == FileEntry((tmp_path / "file").stat().st_size, file_digest(tmp_path / "file"))
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == torch.float32 and found[name].shape == tensor.shape
        assert torch.equal(found[name].view(torch.int32), tensor.contiguous().view(torch.int32)), (
            name
        )
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert file.metadata() == {"a": "12"}
    # The header, three pieces of each full tensor, and one piece that `file_digest` read.
    assert heartbeat._here.ticks == 1 + 3 + 3 + 1


def test_the_tensors_begin_at_a_multiple_of_eight_bytes(tmp_path):
    for length in range(8):
        write_tensors(tmp_path / "file", {"n" * (length + 1): torch.ones(1)}, {})
        content = (tmp_path / "file").read_bytes()
        header = int.from_bytes(content[:8], "little")
        assert header % 8 == 0
        assert json.loads(content[8 : 8 + header])["n" * (length + 1)]["data_offsets"] == [0, 4]


def test_a_rank_without_any_piece_writes_an_empty_file(tmp_path):
    write_tensors(tmp_path / "file", {}, {})
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert list(file.keys()) == [] and file.metadata() == {}


SETTINGS = {
    "fp32, stage 0": ("fp32", 0), "fp32, stage 1": ("fp32", 1), "fp32, stage 2": ("fp32", 2),
    "fp32, stage 3": ("fp32", 3), "bf16, stage 1": ("bf16", 1), "bf16, stage 2": ("bf16", 2),
    "bf16, stage 3": ("bf16", 3),
}  # fmt: skip
BEFORE, AFTER = 2, 2


def build(checkpoint: str, precision: str, stage: int):
    from rlhf_pipeline.config.training import TrainedModelConfig
    from rlhf_pipeline.distributed.engine import train_engine
    from rlhf_pipeline.distributed.zero import EMA
    from rlhf_pipeline.models.loading import load_policy

    # With the usual eps of 1e-8, Adam would amplify the rounding noise of tiny gradients.
    config = TrainedModelConfig.model_validate(
        {
            "optimizer": {
                "learning_rate": 1e-2,
                "warmup_fraction": 0.0,
                "weight_decay": 0.1,
                "eps": 1e-4,
            },
            "deepspeed": {"zero_stage": stage, "precision": precision},
        }
    )
    engine = train_engine(partial(load_policy, Path(checkpoint)), config, BEFORE + AFTER)
    return engine, EMA(engine, 0.75)


def train(engine, ema, steps) -> list[float]:
    """Every rank trains on the same rows, so a step is equal for any number of ranks."""
    losses = []
    for step in steps:
        ids = (torch.arange(24).view(2, 12) * (step + 3)) % 200 + 5
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        ema.update()
        losses.append(loss.item())
    return losses


def outcome(engine, ema, losses) -> dict:
    from rlhf_pipeline.distributed.zero import whole_state_dict

    weights = {name: tensor.clone() for name, tensor in whole_state_dict(engine.module).items()}
    with ema.in_place():
        average = {name: tensor.clone() for name, tensor in whole_state_dict(engine.module).items()}
    return {"losses": losses, "rate": engine.get_lr()[0], "weights": weights, "average": average}


def main(argument: dict, folder: Path) -> None:
    from rlhf_pipeline.distributed.engine_state import load_engine, save_engine
    from rlhf_pipeline.distributed.world import join

    world = join(1, timeout_s=600)
    results = {}
    for name in argument["save"]:
        engine, ema = build(argument["checkpoint"], *SETTINGS[name])
        train(engine, ema, range(BEFORE))
        if world.rank == 0:
            (folder / name).mkdir()
        world.barrier()
        save_engine(engine, folder / name, average=ema.shards)
        world.barrier()
        results[f"uninterrupted {name}"] = outcome(
            engine, ema, train(engine, ema, range(BEFORE, BEFORE + AFTER))
        )
    for saved, name in argument["load"]:
        engine, ema = build(argument["checkpoint"], *SETTINGS[name])
        load_engine(engine, Path(argument.get("folder", folder)) / saved, average=ema.shards)
        results[f"{saved} -> {name}"] = outcome(
            engine, ema, train(engine, ema, range(BEFORE, BEFORE + AFTER))
        )
    if world.rank == 0:
        torch.save(results, folder / "results.pt")


@pytest.fixture(scope="module")
def two(on_ranks, make_model):
    checkpoint = str(make_model("llama", seed=1))
    crossed = [
        ["fp32, stage 2", "fp32, stage 3"],
        ["fp32, stage 3", "fp32, stage 0"],
        ["fp32, stage 0", "fp32, stage 1"],
    ]
    argument = {
        "checkpoint": checkpoint,
        "save": list(SETTINGS),
        "load": [[name, name] for name in SETTINGS] + crossed,
    }
    folder = on_ranks(__file__, argument)
    return checkpoint, folder, torch.load(folder / "results.pt")


@pytest.fixture(scope="module")
def other_ranks(on_ranks, two, world, tmp_path_factory):
    """Training that two ranks saved, continued on one rank (this process) and on three."""
    checkpoint, folder, results = two
    argument = {
        "checkpoint": checkpoint,
        "save": [],
        "load": [[name, name] for name in SETTINGS],
        "folder": folder,
    }
    folders = {1: tmp_path_factory.mktemp("one"), 3: on_ranks(__file__, argument, ranks=3)}
    main(argument, folders[1])
    return results, {ranks: torch.load(found / "results.pt") for ranks, found in folders.items()}


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_continued_training_equals_uninterrupted_training_bit_for_bit(two, name):
    _, _, results = two
    resumed, uninterrupted = results[f"{name} -> {name}"], results[f"uninterrupted {name}"]
    assert resumed["losses"] == uninterrupted["losses"] and resumed["rate"] == uninterrupted["rate"]
    for kind in ("weights", "average"):
        assert all(
            torch.equal(resumed[kind][key], value) for key, value in uninterrupted[kind].items()
        )


@pytest.mark.long
@pytest.mark.parametrize(
    "saved, name",
    [
        ("fp32, stage 2", "fp32, stage 3"),
        ("fp32, stage 3", "fp32, stage 0"),
        ("fp32, stage 0", "fp32, stage 1"),
    ],
)
def test_training_continues_at_another_stage(two, saved, name):
    _, _, results = two
    assert_alike(results[f"{saved} -> {name}"], results[f"uninterrupted {name}"], 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_training_continues_on_another_number_of_ranks(other_ranks, name, ranks):
    results, found = other_ranks
    assert_alike(
        found[ranks][f"{name} -> {name}"],
        results[f"uninterrupted {name}"],
        1e-6 if name.startswith("fp32") else 1e-2,
    )


def assert_alike(found, expected, tolerance):
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert found["rate"] == expected["rate"]
    for kind in ("weights", "average"):
        for key, value in expected[kind].items():
            torch.testing.assert_close(found[kind][key], value, rtol=tolerance, atol=tolerance)


def test_a_missing_file_of_a_rank_is_reported(world, make_model, tmp_path):
    from rlhf_pipeline.distributed.engine_state import load_engine, save_engine
    from rlhf_pipeline.errors import ArtifactError

    engine, ema = build(str(make_model("llama", seed=1)), "fp32", 2)
    save_engine(engine, tmp_path, average=ema.shards)
    (tmp_path / "rank0.safetensors").unlink()
    with pytest.raises(
        ArtifactError, match=r"found 0 of \d+ numbers of weight .*The file of a rank is missing"
    ):
        load_engine(engine, tmp_path, average=ema.shards)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
