"""Which evaluated models are kept, and which one is exported."""

import json
from functools import partial

import pytest
import torch

from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.loading import load_policy, load_tokenizer
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training.best_models import BestModels

CONFIG = SFTConfig.model_validate(
    {
        "epochs": 1,
        "batch_size": 1,
        "micro_batch_size_per_gpu": 1,
        "optimizer": {"learning_rate": 1e-3},
    }
)


@pytest.fixture
def policy(make_model):
    return make_model("llama", seed=1)


@pytest.fixture
def keeper(policy, world, tmp_path):
    """Makes what a stage, or the one that goes on after it, keeps its models by."""
    job = LaunchedJob("sft", "f", 1, {}, {"base_model": policy}, {}, tmp_path, 60.0)
    load = partial(load_policy, policy)
    return lambda keep: BestModels(job, world, load_tokenizer(policy), CONFIG, load, keep=keep)


def marked(policy, number):
    """The model with a number where one can read it."""
    model = load_policy(policy, "fp32")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = number
    return model


def mark(folder):
    return load_policy(folder, "fp32").lm_head.weight[0, 0].item()


def standing(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_best_two_stand_and_the_earlier_of_equals_is_better(policy, keeper, tmp_path):
    best = keeper(2)
    assert best.best is None and "No checkpoint is left" in best.kept
    for step, merit in ((2, 1.0), (4, 3.0), (6, 2.0), (8, 3.0), (10, 0.5)):
        best.offer(marked(policy, step), step, merit, {"validation/loss": -merit})
        best.forget_the_rest()
    assert standing(tmp_path / "checkpoints") == ["best-00000004", "best-00000008"]
    assert best.best.step == 4
    assert best.finish(marked(policy, 10)) == {"step": 4, "validation/loss": -3.0}
    assert standing(tmp_path / "checkpoints") == ["best-00000004", "best-00000008", "last"]
    assert mark(tmp_path / "export") == 4.0 and mark(tmp_path / "checkpoints" / "last") == 10.0


def test_the_best_stands_until_a_checkpoint_knows_its_successor(policy, keeper, tmp_path):
    """Killed between the two, training goes on from where the earlier one was the best, and finds it."""
    best = keeper(1)
    best.offer(marked(policy, 2), 2, 1.0, {})
    state = json.loads(json.dumps(best.state()))
    best.offer(marked(policy, 4), 4, 2.0, {})
    assert standing(tmp_path / "checkpoints") == ["best-00000002", "best-00000004"]

    again = keeper(1)
    again.restored(state)
    assert again.kept.endswith(f"of step 2, is left in {tmp_path}/checkpoints/best-00000002.")
    again.offer(marked(policy, 4.5), 4, 2.0, {})
    again.forget_the_rest()
    assert standing(tmp_path / "checkpoints") == ["best-00000004"]
    assert mark(tmp_path / "checkpoints" / "best-00000004") == 4.5


@pytest.mark.parametrize("resumed", [False, True])
def test_a_best_model_that_was_damaged_since_is_not_exported(policy, keeper, tmp_path, resumed):
    best = keeper(1)
    best.offer(marked(policy, 2), 2, 1.0, {})
    if resumed:
        state, best = json.loads(json.dumps(best.state())), keeper(1)
        best.restored(state)
    weights = tmp_path / "checkpoints" / "best-00000002" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(
        ArtifactError,
        match=r"best-00000002 was changed after step 2, the best; remove .*/checkpoints and",
    ):
        best.finish(marked(policy, 4))
    assert not (tmp_path / "export").exists()


def test_without_an_offer_there_is_nothing_to_export(policy, keeper):
    with pytest.raises(ValueError, match="no model was offered"):
        keeper(1).finish(load_policy(policy, "fp32"))
