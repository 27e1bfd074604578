"""Where a model is loaded to, and what MLflow reads of it."""

from functools import partial

import pytest
import torch

from rlhf_pipeline.distributed.engine import untrained
from rlhf_pipeline.models.loading import MLMODEL, load_policy, load_tokenizer
from rlhf_pipeline.models.scalar_head import load_scores

LOADS = {
    "policy": load_policy,
    "critic": partial(load_scores, new_head=True),
    "untrained reward model": untrained,
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("family", ["llama", "opt", "qwen2"])
def test_weights_are_read_onto_the_device(make_model, load, family):
    """The device stands for a GPU and has no memory: a weight that is elsewhere was copied."""
    model = load(make_model(family), "bf16", device=torch.device("meta"))
    tensors = [*model.parameters(), *model.buffers()]
    assert tensors and all(tensor.is_meta for tensor in tensors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["llama", "opt", "qwen2"])
def test_a_gpu_gets_the_same_bits(make_model, family):
    folder = make_model(family)
    plain = load_policy(folder, "bf16")
    placed = load_policy(folder, "bf16", device=torch.device("cuda", 0))
    for of in ("named_parameters", "named_buffers"):
        for name, tensor in getattr(plain, of)():
            found = dict(getattr(placed, of)())[name]
            assert found.is_cuda and torch.equal(found.cpu(), tensor), name


def test_mlflow_reads_the_signature_and_the_loader(tmp_path):
    from mlflow.models import Model, ModelSignature
    from mlflow.types.schema import ColSpec, ParamSchema, ParamSpec, Schema

    (tmp_path / "MLmodel").write_text(MLMODEL)
    read = Model.load(tmp_path)
    parameters = [
        ("max_new_tokens", "long", 128),
        ("temperature", "double", 0.0),
        ("seed", "long", 0),
    ]
    assert read.signature == ModelSignature(
        Schema([ColSpec("string", "prompt")]),
        Schema([ColSpec("string")]),
        ParamSchema([ParamSpec(*each) for each in parameters]),
    )
    assert read.flavors == {"python_function": {"loader_module": "rlhf_pipeline.serving"}}


def test_a_tokenizer_has_the_same_bytes_with_and_without_the_hub(make_model, tmp_path, monkeypatch):
    """Otherwise a shell with HF_HUB_OFFLINE makes other models, and later stages train again."""
    folder, saved = make_model("llama", seed=1), []
    for offline in (False, True):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        load_tokenizer(folder).save_pretrained(tmp_path / str(offline))
        saved.append((tmp_path / str(offline) / "tokenizer_config.json").read_text())
    assert saved[0] == saved[1] and "local_files_only" not in saved[0]
