"""Training that is saved, loaded and continued equals uninterrupted training, at every ZeRO stage.

It also continues on another number of ranks and at other stages. Two ranks are those of the lab.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rlhf_pipeline.config.training import TrainedModelConfig
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.distributed.engine_state import load_engine, save_engine
from rlhf_pipeline.distributed.tensor_file import write_tensors
from rlhf_pipeline.distributed.zero import EMA, whole_state_dict
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.loading import load_policy

CASES = {  # precision, stage that saves, stage that loads
    **{f"fp32, stage {stage}": ("fp32", stage, stage) for stage in range(4)},
    **{f"bf16, stage {stage}": ("bf16", stage, stage) for stage in (1, 2, 3)},
    "from 2 to 3": ("fp32", 2, 3),
    "from 3 to 0": ("fp32", 3, 0),
    "from 0 to 1": ("fp32", 0, 1),
}
BEFORE, AFTER = 2, 2


def build(checkpoint, precision, stage):
    # With the usual eps of 1e-8, Adam would amplify the rounding noise of tiny gradients.
    optimizer = {"learning_rate": 1e-2, "warmup_fraction": 0.0, "weight_decay": 0.1, "eps": 1e-4}
    deepspeed = {"zero_stage": stage, "precision": precision}
    config = TrainedModelConfig.model_validate({"optimizer": optimizer, "deepspeed": deepspeed})
    engine = train_engine(partial(load_policy, checkpoint), config, BEFORE + AFTER)
    return engine, EMA(engine, 0.75)


def train(engine, ema, steps):
    """Every rank trains on the same rows, so a step is equal for any number of ranks."""
    for step in steps:
        ids = (torch.arange(24).view(2, 12) * (step + 3)) % 200 + 5
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        ema.update()


def finished(engine, ema):
    """The weights, their average and the learning rate at the end of training, as one dictionary.

    At stage 3, the other ranks have none.
    """
    train(engine, ema, range(BEFORE, BEFORE + AFTER))
    found = {"rate": torch.tensor(engine.get_lr()[0])}
    found |= {name: value.clone() for name, value in whole_state_dict(engine.module).items()}
    with ema.in_place():
        average = whole_state_dict(engine.module).items()
        return found | {f"average {name}": value.clone() for name, value in average}


def distance(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


def saved(world, checkpoint, folder, precision, stage):
    """What an engine writes after some steps, and how its training ends."""
    folder.mkdir(exist_ok=True)
    engine, ema = build(checkpoint, precision, stage)
    train(engine, ema, range(BEFORE))
    save_engine(engine, folder, average=ema.shards)
    world.barrier()
    return finished(engine, ema)


def continued(checkpoint, folder, precision, stage):
    engine, ema = build(checkpoint, precision, stage)
    load_engine(engine, folder, average=ema.shards)
    return finished(engine, ema)


def case(lab, precision, saving, loading):
    """How far the ends are apart; the folder of the engine, and the end, for another process."""
    folder, checkpoint = lab.folder / "engine", lab.models["llama"]
    whole = saved(lab.world, checkpoint, folder, precision, saving)
    found = continued(checkpoint, folder, precision, loading)
    if lab.world.rank > 0:  # at stage 3, it has no weights
        return None
    torch.save(whole, lab.folder / "end.pt")
    return {"apart": distance(whole, found), "folder": str(lab.folder)}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_training_continues_as_if_uninterrupted_also_on_one_rank(cells, name, world, make_model):
    """Bit for bit, at the same stage and number of ranks."""
    precision, saving, loading = CASES[name]
    assert cells[name]["apart"] <= (0 if saving == loading else 1e-6)
    folder = Path(cells[name]["folder"])
    found = continued(make_model("llama", seed=3), folder / "engine", precision, saving)
    limit = 1e-6 if precision == "fp32" else 1e-2
    assert distance(torch.load(folder / "end.pt"), found) <= limit


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_files_of_any_number_of_ranks_make_up_an_engine(world, make_model, tmp_path, stage):
    """The pieces of three ranks end anywhere, and one of them is lost."""
    checkpoint = make_model("llama", seed=1)
    whole = saved(world, checkpoint, tmp_path, "fp32", stage)
    with safe_open(tmp_path / "rank0.safetensors", framework="pt") as file:
        starts = file.metadata()
    tensors = load_file(tmp_path / "rank0.safetensors")
    tensors = {name: value.clone() for name, value in tensors.items()}  # the file changes
    assert {*starts.values()} == {"0"}
    for rank, (first, last) in enumerate(((0, 5), (5, 1000), (1000, None))):
        part = {name: value[first:last] for name, value in tensors.items()}
        part = {name: value for name, value in part.items() if len(value)}
        write_tensors(part, tmp_path / f"rank{rank}.safetensors", dict.fromkeys(starts, str(first)))
    assert distance(whole, continued(checkpoint, tmp_path, "fp32", stage)) == 0
    (tmp_path / "rank1.safetensors").unlink()
    lost = r"found \d+ of \d+ numbers of weight .*The file of a rank is missing"
    with pytest.raises(ArtifactError, match=lost):
        continued(checkpoint, tmp_path, "fp32", stage)
