"""Nothing in a model's folder is executed: real pickles and real code would leave a marker."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from model_with_code import bring_code
from safetensors.torch import load_file

from rlhf_pipeline.config.rewards import ModelReward
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models import base_model
from rlhf_pipeline.models.loading import load_finished, load_policy, load_tokenizer
from rlhf_pipeline.models.scalar_head import load_scores
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.scoring.reward_sources import ModelSource, Reading

PICKLES = (
    "pytorch_model.bin training_args.bin adapter_model.bin optimizer.pt scheduler.pt rng_state.pth "
    "tokenizer.pkl vocab.pkl vocab.bin special_tokens_map.pkl mp_rank_00_model_states.pt"
).split()


class Bait:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "executed"


@pytest.fixture
def folder(make_model, tmp_path):
    """A valid model that a test may change."""
    return Path(shutil.copytree(make_model("llama"), tmp_path / "model"))


def make_base(path, target, **options):
    """Run stage base_model in this process and return its export."""
    block = {"path": str(path), "architecture": None, **options}
    job = LaunchedJob("base_model", "f", 1, {"base_model": block}, {}, {}, target, 60.0)
    base_model.main(job)
    return job.export


load_head = partial(load_scores, precision="fp32", new_head=True)
LOADS = {
    "policy": partial(load_policy, precision="fp32"),
    "scores": load_head,
    "reward model from elsewhere": partial(load_head, foreign=True),
    "base model": lambda folder: make_base(folder, folder.parent / "work"),
    "finished policy": load_finished,
}
zipped_or_not = pytest.mark.parametrize("zipped", [True, False], ids=["torch.save", "pickle"])
every_load = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)


@zipped_or_not
def test_the_planted_pickle_executes(tmp_path, marker, zipped):
    plant(tmp_path / "bait.bin", marker, zipped=zipped)
    torch.load(tmp_path / "bait.bin", weights_only=False)
    assert marker.exists()


def plant(file, marker, *, zipped=True):
    torch.save({"weight": Bait(marker)}, file, _use_new_zipfile_serialization=zipped)


@every_load
def test_pickles_next_to_the_weights_are_not_read(folder, marker, load):
    for name in PICKLES:
        plant(folder / name, marker)
    load(folder)
    load_tokenizer(folder)
    assert not marker.exists()


def without_weights(folder, marker):
    (folder / "model.safetensors").unlink()
    for name in PICKLES:
        plant(folder / name, marker, zipped=name.endswith("n"))


def with_adapter(folder, marker):
    fields = {"peft_type": "LORA", "base_model_name_or_path": str(folder)}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    plant(folder / "adapter_model.bin", marker)


def selecting_a_pickle(folder, marker):
    config = folder / "config.json"
    fields = json.loads(config.read_text()) | {"transformers_weights": "adapter_model.bin"}
    config.write_text(json.dumps(fields))
    plant(folder / "adapter_model.bin", marker)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_weights, r"no weights as safetensors.*base_model\.unpickle_weights"),
        (with_adapter, r"found an adapter \(adapter_config\.json\)"),
        (selecting_a_pickle, r"'adapter_model\.bin' in config\.json, expected a safeten"),
    ],
)
@every_load
def test_a_pickle_does_not_take_the_place_of_the_weights(folder, marker, load, change, message):
    change(folder, marker)
    with pytest.raises(ArtifactError, match=message):
        load(folder)
    assert not marker.exists()


@zipped_or_not
def test_unpickle_weights_reads_tensors_and_nothing_else(folder, tmp_path, marker, zipped):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    plant(folder / "pytorch_model.bin", marker, zipped=zipped)
    with pytest.raises(ArtifactError, match=r"found more than tensors in pytorch_model\.bin"):
        make_base(folder, tmp_path / "bad", unpickle_weights=True)
    assert not marker.exists()

    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    export = make_base(folder, tmp_path / "good", unpickle_weights=True)
    assert not list(export.glob("*.bin"))
    exported = load_file(export / "model.safetensors")
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())


@pytest.fixture
def with_code(folder, marker, tmp_path, monkeypatch):
    """A model whose type is defined by code in its folder."""
    cache = "transformers.dynamic_module_utils.HF_MODULES_CACHE"
    monkeypatch.setattr(cache, str(tmp_path / "modules"))
    bring_code(folder, marker)
    return folder


@pytest.mark.parametrize("load", [*LOADS.values(), load_tokenizer], ids=[*LOADS, "tokenizer"])
def test_code_of_a_model_is_not_executed_by_default(with_code, marker, load):
    message = r"which is not executed\. Fix: .*base_model\.trust_remote_code"
    with pytest.raises(ArtifactError, match=message):
        load(with_code)
    assert not marker.exists()


def test_code_for_a_type_that_transformers_knows_is_ignored(with_code, marker):
    config = json.loads((with_code / "config.json").read_text())
    (with_code / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    found = type(load_policy(with_code, "fp32"))
    assert found.__module__ == "transformers.models.llama.modeling_llama"
    assert not marker.exists()


def test_trusted_code_moves_with_the_model_through_the_stages_and_is_refused_elsewhere(
    with_code, marker, tmp_path, monkeypatch
):
    export = make_base(with_code, tmp_path / "base", trust_remote_code=True)
    assert marker.exists()
    shutil.rmtree(with_code)  # the export does not depend on the original folder
    stage = tmp_path / "stage"
    model = load_policy(export, "fp32", trust_remote_code=True)
    model.save_pretrained(stage)
    load_tokenizer(export, trust_remote_code=True).save_pretrained(stage)
    shutil.copy(export / "token_contract.json", stage)
    scores = load_scores(stage, "fp32", new_head=True, trust_remote_code=True)
    found = [type(loaded).__name__ for loaded in (model, scores.classifier)]
    assert found == ["OwnForCausalLM", "OwnForSequenceClassification"]
    for load in (*LOADS.values(), load_tokenizer):
        with pytest.raises(ArtifactError, match=r"base_model\.trust_remote_code"):
            load(stage)
    monkeypatch.setenv("RLHF_TRUST_REMOTE_CODE", "true")
    assert type(load_finished(stage)[0]).__name__ == "OwnForCausalLM"


def test_trust_in_the_base_model_does_not_extend_to_a_reward_model(with_code, marker):
    contract, world = TokenContract.read(with_code), World(0, 1, torch.device("cpu"))
    reward = ModelReward(path=str(with_code))
    job = LaunchedJob("ppo", "f", 1, {}, {}, {}, with_code, 60.0)
    with pytest.raises(ArtifactError, match=r"applies to the base model"):
        ModelSource.load(reward, "ppo.rewards.0", "rewards.0", job, Reading([contract], 2, world))
    assert not marker.exists()
