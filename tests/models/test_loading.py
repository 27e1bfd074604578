"""Where a model is loaded to, and what a finished policy is ready for."""

import json
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.engine import untrained
from rlhf_pipeline.models import export, loading
from rlhf_pipeline.models.loading import load_finished, load_policy, load_tokenizer
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


@pytest.mark.parametrize(
    ("fields", "precision"),
    [
        ({"dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": "float16"}, "fp32"),  # which contains its numbers
        ({}, "fp32"),
    ],
)
def test_the_precision_in_which_a_model_computes_as_it_was_saved(tmp_path, fields, precision):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert loading.saved_precision(tmp_path) == precision


def test_an_export_may_be_in_fp16_and_stays_in_it(make_model, tmp_path):
    folder, half = make_model("llama"), tmp_path / "half"
    export.main(folder, half, "fp16", "5GB", None)
    shutil.copy(folder / "token_contract.json", half)
    export.main(half, tmp_path / "again", None, "5GB", None)
    expected = load_policy(folder, "fp16").state_dict()
    for target in (half, tmp_path / "again"):
        found = load_file(target / "model.safetensors")
        assert found and all(torch.equal(found[name], expected[name]) for name in found)


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


def test_no_setting_of_a_saved_model_changes_an_answer_and_padding_is_on_the_left(make_model):
    folder = make_model("llama")
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "top_k": 1, "repetition_penalty": 9.0, "no_repeat_ngram_size": 1, '
        '"suppress_tokens": [1]}'
    )
    finished, tokenizer = load_finished(folder)
    assert (tokenizer.padding_side, finished.training) == ("left", False)
    plain = loading.plain_generation(TokenContract.read(folder))
    for model in (finished, load_policy(folder, "fp32")):
        assert model.generation_config.to_diff_dict() == plain.to_diff_dict()


def test_a_tokenizer_has_the_same_bytes_with_and_without_the_hub(make_model, tmp_path, monkeypatch):
    """Otherwise a shell with HF_HUB_OFFLINE makes other models, and later stages train again."""
    folder, saved = make_model("llama", seed=1), []
    for offline in (False, True):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        load_tokenizer(folder).save_pretrained(tmp_path / str(offline))
        saved.append((tmp_path / str(offline) / "tokenizer_config.json").read_text())
    assert saved[0] == saved[1] and "local_files_only" not in saved[0]


# --- what the import of the package leaves out ----------------------------------------------------


IMPORT = """
import gc, sys
import rlhf_pipeline.models
print([name for name in ("boto3", "sklearn", "scipy") if name in sys.modules], gc.isenabled())
import boto3
print(boto3.__name__)
"""


@pytest.mark.parametrize("before", [False, True])
def test_the_import_leaves_libraries_out_which_can_be_imported_later(before):
    """What has been imported before stays, and transformers that has found SciPy gets it."""
    found = "from transformers.utils import is_scipy_available; is_scipy_available()\n"
    found = f"{found}import boto3\n" * before
    command = [sys.executable, "-c", found + IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{['boto3', 'scipy'] * before} True", "boto3"]
