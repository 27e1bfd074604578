"""The evaluated models that are kept, the one that is exported, and the space that both need."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_jobs import trained

from rlhf_pipeline.config.training import SFTConfig, TrainedModelConfig
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.distributed.model_files import save_model
from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.models.loading import load_policy, load_tokenizer
from rlhf_pipeline.runtime import manifest
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import file_entries
from rlhf_pipeline.training.checkpoints import BestModels, Checkpoints

CONFIG = SFTConfig.model_validate(
    {"epochs": 1, "batch_size": 1, "micro_batch_tokens": 16, "optimizer": {"learning_rate": 1e-3}}
)


@pytest.fixture
def policy(make_model):
    return make_model("llama", seed=1)


@pytest.fixture
def make_best_models(policy, world, tmp_path):
    """Makes the `BestModels` of a stage, or of the same stage when it resumes."""
    job = LaunchedJob("sft", "f", 1, {}, {"base_model": policy}, {}, tmp_path, 60.0)
    load = partial(load_policy, policy)
    return lambda keep: BestModels(job, world, load_tokenizer(policy), CONFIG, load, keep=keep)


def numbered(policy, number):
    """The model with a number that identifies it."""
    model = load_policy(policy, "fp32")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = number
    return model


def number_of(folder):
    return load_policy(folder, "fp32").lm_head.weight[0, 0].item()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_best_are_kept_and_the_earlier_of_equals_is_better(policy, make_best_models, tmp_path):
    best = make_best_models(2)
    assert best.best is None and best.kept == "No model was evaluated, so none is kept."
    with pytest.raises(AssertionError, match="no model was offered"):
        best.finish()
    for step, score in ((2, 1.0), (4, 3.0), (6, 2.0), (8, 3.0), (10, 0.5)):
        best.offer(numbered(policy, step), step, score, {"validation/loss": -score})
        best.forget_the_rest()
    assert names(tmp_path / "checkpoints") == ["best-00000004", "best-00000008"]
    assert best.best.step == 4
    assert best.finish() == {"step": 4, "validation/loss": -3.0}
    assert names(tmp_path / "checkpoints") == ["best-00000004", "best-00000008"]
    assert number_of(tmp_path / "export") == 4.0


def test_a_model_leaves_only_after_a_checkpoint_has_its_successor(
    policy, make_best_models, tmp_path
):
    """Training that is killed in between resumes with the earlier ranking and finds its model."""
    best = make_best_models(1)
    best.offer(numbered(policy, 2), 2, 1.0, {})
    state = json.loads(json.dumps(best.state()))
    best.offer(numbered(policy, 4), 4, 2.0, {})
    assert names(tmp_path / "checkpoints") == ["best-00000002", "best-00000004"]

    again = make_best_models(1)
    again.restored(state)
    assert again.kept.endswith(f"of step 2, is kept in {tmp_path}/checkpoints/best-00000002.")
    again.offer(numbered(policy, 4.5), 4, 2.0, {})
    again.forget_the_rest()
    assert names(tmp_path / "checkpoints") == ["best-00000004"]
    assert number_of(tmp_path / "checkpoints" / "best-00000004") == 4.5


def test_the_export_is_read_neither_for_its_manifest_nor_to_compare_it(
    policy, make_best_models, tmp_path, monkeypatch
):
    """The digest of a large file is computed while it is written, and while it is copied."""
    weights, reads, read = "model.safetensors", [], manifest.file_digest
    monkeypatch.setattr(manifest, "PIECE", 2**12)
    monkeypatch.setattr(
        manifest, "file_digest", lambda path: (reads.append(path.name), read(path))[1]
    )
    best = make_best_models(1)
    best.offer(numbered(policy, 2), 2, 1.0, {})
    best.finish()
    assert number_of(tmp_path / "export") == 2.0
    entry = file_entries(tmp_path / "export")[weights]
    assert reads and weights not in reads
    assert entry.matches(tmp_path / "export" / weights)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_best_model_that_has_changed_is_not_exported(policy, make_best_models, tmp_path, resumed):
    best = make_best_models(1)
    best.offer(numbered(policy, 2), 2, 1.0, {})
    if resumed:
        state, best = json.loads(json.dumps(best.state())), make_best_models(1)
        best.restored(state)
    weights = tmp_path / "checkpoints" / "best-00000002" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    message = r"best-0{7}2: the best model has changed since step 2\. Fix: remove .*/checkpoints"
    with pytest.raises(ArtifactError, match=message):
        best.finish()
    assert not (tmp_path / "export").exists()


# --- the disk space that is required before anything is written -----------------------------------


@pytest.mark.parametrize(("zero_stage", "fits"), [(0, True), (1, False)])
def test_space_is_required_for_each_rank_only_if_the_engine_is_sharded(
    world, make_model, disk, zero_stage, fits
):
    """At ZeRO stage 0, only the first rank writes. The disk has space for one copy.

    A copy contains weights and two moments, 12 bytes per number.
    """
    config = TrainedModelConfig.model_validate(trained(zero_stage))
    engine = train_engine(partial(load_policy, make_model("llama")), config, 4)
    numbers = sum(parameter.numel() for parameter in engine.module.parameters())
    folder = disk.path / "checkpoints"
    checkpoints = Checkpoints(folder, replace(world, size=2), {"actor": engine}, keep=2)
    disk.leave(12 * numbers + 2**17)
    message = r"the checkpoint of step 1 needs .* MiB, .* MiB free$"
    with nullcontext() if fits else pytest.raises(StageError, match=message):
        checkpoints.save(1, {})
    assert names(folder) == (["step-00000001"] if fits else [])
    assert (folder / "step-00000001" / "actor" / "rank0.safetensors").is_file() == fits


def test_a_model_that_does_not_fit_is_not_written(tokenizer, make_model, disk):
    """Tied weights are written once: the model fits, a second copy of its embeddings would not."""
    model = load_policy(make_model("qwen2", vocabulary=2048), "fp32")  # 0.25 MiB of embeddings
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    disk.leave(size - 2**12)
    with pytest.raises(StageError, match=r"the model for .*/best needs .* MiB, .* MiB free$"):
        save_model(model, tokenizer, disk.path / "best")
    assert not (disk.path / "best").exists()
    disk.make_room()
    disk.leave(size + 2**17)  # and the tokenizer
    save_model(model, tokenizer, disk.path / "best")
    assert (disk.path / "best" / "model.safetensors").is_file()
