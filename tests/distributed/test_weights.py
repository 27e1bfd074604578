"""Digests of frozen weights and of trained ones, on two ranks of the lab."""

from functools import partial

import pytest
import torch

from rlhf_pipeline.config.training import FrozenDeepSpeedConfig, LoRAConfig, TrainedModelConfig
from rlhf_pipeline.distributed.engine import frozen_model, train_engine
from rlhf_pipeline.distributed.weights import check_frozen, digest, trained_digest
from rlhf_pipeline.distributed.zero import fp32_shards, pieces
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.models.lora import add_adapters

SIZE = 2**20  # of the pieces of a digest
STAGES = (0, 1, 2, 3)
CASES = {f"moves, stage {stage}": ("moves", stage) for stage in STAGES} | {
    "one rank loads other bits": ("load", 0),
    "a bit of one rank changes": ("change", 0),
    "a bit of a shard changes": ("change", 3),
    "the weights beside adapters": ("adapters", 0),
}


def moves(lab, stage: int) -> dict[str, object]:
    """The digests of the fp32 weights at the start, again, and after a change of one last digit."""
    fields = {"optimizer": {"learning_rate": 1e-2}, "deepspeed": {"zero_stage": stage}}
    config = TrainedModelConfig.model_validate(fields)
    engine = train_engine(partial(load_policy, lab.models["llama"]), config, 1)
    start, again = (trained_digest(engine, lab.world) for _ in range(2))
    if lab.world.rank == 0 or stage == 0:
        weight = next(iter(pieces(engine, fp32_shards(engine))))[2]
        with torch.no_grad():
            weight[-1] = torch.nextafter(weight[-1], torch.tensor(9.0))
    return {"start": start, "same": again == start, "moved": trained_digest(engine, lab.world)}


def message(function) -> str:
    try:
        function()
    except StageError as error:
        return str(error)
    return ""


def flip(weight, bit: int) -> None:
    """Flip one bit of the last number of a float32 tensor."""
    weight.data.view(-1).view(torch.int32)[-1] ^= 1 << bit


def case(lab, kind: str, stage: int):
    if kind == "moves":
        return moves(lab, stage)
    if kind == "adapters":
        model = load_policy(lab.models["llama"], "fp32")
        add_adapters(model, LoRAConfig())
        check = partial(check_frozen, {"policy": model}, lab.world, {})
        check()
        by_name = dict(model.named_parameters())
        with torch.no_grad():  # a step changes the adapters
            for name in by_name:
                by_name[name] += "lora" in name
        unchanged = message(check)
        flip(next(by_name[name] for name in by_name if "base_layer" in name), 0)
        return [unchanged, message(check)]
    settings = FrozenDeepSpeedConfig(precision="fp32", zero_stage=stage)
    model = frozen_model(partial(load_policy, lab.models["llama"]), settings, lab.world)
    weight = model.get_parameter(("module." if stage else "") + "model.layers.1.mlp.up_proj.weight")
    check = partial(check_frozen, {"reference": model}, lab.world, {})
    sound = [message(check), message(check)] if kind == "change" else []
    if lab.world.rank == 1:
        flip(getattr(weight, "ds_tensor", weight), 31 if kind == "change" else 0)
    return [*sound, message(check)]


@pytest.mark.parametrize("name", [name for name in CASES if "moves" in name])
def test_a_moved_weight_shows_at_every_stage(cells, name):
    cell = cells[name]
    assert cell["same"] and cell["moved"] != cell["start"]
    assert cell["start"] == cells["moves, stage 0"]["start"]  # shards do not change it


WEIGHT = "model.layers.1.mlp.up_proj.weight"
REST = (
    "expected those of the start and of other ranks: it is frozen. Fix: run the same command "
    "again; if it recurs, test the memory of that GPU or machine"
)


@pytest.mark.parametrize(
    ("name", "before", "weight"),
    [
        ("one rank loads other bits", [], WEIGHT),
        ("a bit of one rank changes", ["", ""], WEIGHT),
        ("a bit of a shard changes", ["", ""], f"module.{WEIGHT}, shard 1"),
    ],
)
def test_other_bits_are_found_at_the_start_and_at_a_checkpoint(cells, name, before, weight):
    found = f"reference: {weight}: found other bits on rank 1 (1 weights), {REST}"
    assert cells[name] == [*before, found]


def test_adapters_may_change_and_the_weights_beside_them_not(cells):
    unchanged, found = cells["the weights beside adapters"]
    assert unchanged == "" and "base_layer.weight: found other bits on rank 0" in found


def test_a_digest_weighs_each_number_by_its_place():
    """The bits of 1.0 and 2.0 in float32 are 127 * 2^23 and 2^30; the factors are 1 and 3."""
    assert digest(torch.tensor([1.0, 2.0])) == 127 * 2**23 + 3 * 2**30
    assert digest(torch.tensor([2.0, 1.0])) == 2**30 + 3 * 127 * 2**23
    assert digest(torch.empty(0)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8])
def test_every_flipped_bit_changes_the_digest(dtype):
    numbers = torch.zeros(SIZE + 3).to(dtype)
    start, size = digest(numbers), numbers.element_size()
    bits = numbers.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[size])
    seen = set()
    for place in (0, SIZE - 1, SIZE, SIZE + 2):  # both pieces
        for bit in range(8 * size):
            mask = torch.tensor(1).bitwise_left_shift(bit).to(bits.dtype)
            bits[place] ^= mask
            seen.add(digest(numbers))
            bits[place] ^= mask
    assert start not in seen and digest(numbers) == start
