"""Models built from their configuration, with a trained tokenizer."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import imported, job_file
from stand_in_hub import COMMITS, serving
from transformers import AutoModelForCausalLM

from rlhf_pipeline.config.base_model import BYTES, BaseModelConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import ArtifactError, ConfigError
from rlhf_pipeline.models import base_model
from rlhf_pipeline.models.base_model import as_loaded, build_model
from rlhf_pipeline.models.loading import load_policy, load_tokenizer
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import folder_digest


def test_every_family_is_built_for_the_tokenizer_that_loads_with_it(
    tokenizer, architecture, family, tmp_path
):
    config = BaseModelConfig(architecture=architecture(family), vocab_size=300)
    own = as_loaded(tokenizer, config, tmp_path)
    model = build_model(config, own)
    model.save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)

    loaded = load_tokenizer(tmp_path)
    assert TokenContract.of(loaded) == TokenContract.of(own)
    assert (own.pad_token_id, own.eos_token_id) == (0, 1)
    ids = loaded("snow is  white, 123")["input_ids"]
    assert loaded.decode(ids) == "snow is  white, 123" and max(ids) < 288

    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.model_type == family
    found = again.config
    assert (found.hidden_size, found.num_hidden_layers, found.num_attention_heads) == (32, 2, 4)
    assert (found.pad_token_id, found.eos_token_id, found.bos_token_id) == (0, 1, None)
    assert len(loaded) == (289 if family == "qwen2" else 288)
    assert again.get_input_embeddings().num_embeddings == 320  # 5 * 64


@pytest.fixture
def build(architecture, tokenizer):
    """Builds a model of a family, some of whose fields are changed."""

    def build(family, **fields):
        config = BaseModelConfig(architecture=architecture(family) | fields, vocab_size=300)
        return build_model(config, tokenizer).eval()

    return build


@pytest.mark.parametrize(
    ("value", "reason"), [("64", "expected int, got str"), (None, "got NoneType"), (33, "33")]
)
def test_an_invalid_value_is_reported(build, value, reason):
    message = rf"(?s)base_model\.architecture: cannot build the model: .*{reason}"
    with pytest.raises(ConfigError, match=message):
        build("llama", hidden_size=value)


def export(folder, block, digests):
    """Run stage base_model in this process; return its metrics."""
    job = LaunchedJob("base_model", "f", 1, {"base_model": block}, {}, digests, folder, 60.0)
    return base_model.main(job)


@pytest.mark.slow
def test_the_program_imports_neither_deepspeed_nor_mlflow(make_model, tmp_path):
    """Saving a model looks for engines of DeepSpeed, whose import takes over a second."""
    block = {"base_model": {"path": str(make_model("llama"))}}
    job = LaunchedJob("base_model", "f", 1, block, {}, {}, tmp_path, 60.0)
    modules, _ = imported(base_model.__spec__.name, job_file(job))
    assert (job.export / "model.safetensors").is_file()
    assert not modules & {"deepspeed", "mlflow"}


def test_a_tokenizer_that_changes_when_saved_is_refused(architecture, tmp_path, monkeypatch):
    monkeypatch.setattr(base_model, "as_loaded", lambda tokenizer, *_: tokenizer)
    message = r"base_model\.architecture: the tokenizer changes when it is saved and loaded"
    with pytest.raises(ArtifactError, match=message):
        export(tmp_path, {"architecture": architecture("qwen2"), "vocab_size": 300}, {})


def test_a_folder_that_has_changed_since_the_plan_is_refused(make_model, tmp_path):
    folder = make_model("llama", seed=5)
    block, planned = {"path": str(folder)}, {BYTES: folder_digest(folder)}
    export(tmp_path, block, planned)
    (folder / "generation_config.json").write_text("{}")
    with pytest.raises(ArtifactError, match="found other bytes than when the stage was planned"):
        export(tmp_path, block, planned)


def test_a_model_is_enlarged_for_added_tokens_alone(make_model, tmp_path):
    """A vocabulary that is larger by itself belongs to another model."""
    folder = make_model("llama", seed=6)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<new>", "<newer>"])
    tokenizer.save_pretrained(folder)
    assert export(tmp_path, {"path": str(folder)}, {})["base_model/new_tokens"] == 2
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert made.config.vocab_size == 320  # 290, by 64
    small = make_model("llama", seed=6, vocabulary=200)
    (folder / "model.safetensors").write_bytes((small / "model.safetensors").read_bytes())
    (folder / "config.json").write_text((small / "config.json").read_text())
    message = r"of 288 tokens, expected at most the model's 200 embeddings\. It"
    with pytest.raises(ArtifactError, match=rf"found a vocabulary {message}"):
        export(tmp_path, {"path": str(folder)}, {})


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "lfm2", "granitemoehybrid"])
def test_families_whose_states_hold_no_padding_are_accepted(build, family):
    torch.manual_seed(1)
    base_model.try_states(build(family))


def test_a_cache_that_a_family_does_not_take_is_refused(tmp_path):
    """Mamba takes its cache by another name, and would sample each token without the others."""
    fields = {
        "model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8,
        "initializer_range": 0.2,
    }  # fmt: skip
    with pytest.raises(
        ArtifactError,
        match=r"base_model: a padded row of a mamba: found ArithmeticError: "
        r"logits that differ by [\d.]+ from those of the row alone, expected at most 0\.00012\.",
    ):
        export(tmp_path, {"architecture": fields, "vocab_size": 300}, {})


def test_padding_in_a_state_is_refused(build):
    """A bias of the projection before a convolution makes padding differ from 0."""
    model = build("lfm2", conv_bias=True)
    base_model.try_states(model)  # all biases are 0
    torch.nn.init.normal_(model.model.layers[0].conv.in_proj.bias)
    with pytest.raises(ArtifactError, match=r"of a lfm2: .* logits that differ by 0\.\d+ from"):
        base_model.try_states(model)


def test_a_layer_that_no_cache_knows_is_refused(build):
    model = build("lfm2")
    model.config.layer_types = ["conv", "minimax_m3_sparse"]
    with pytest.raises(ArtifactError, match=r"of a lfm2: found KeyError: 'minimax_m3_sparse', exp"):
        base_model.try_states(model)


# --- from the hub: the branch's commit is resolved, loaded, and part of the recipe ----------------


PROGRAM = """
import json, sys
from pathlib import Path
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.pipelines.preparation import base_model
from rlhf_pipeline.stages.job import RunContext
from rlhf_pipeline.stages.run import StageRunner

split = SplitConfig(sources=[{"name": "synthetic"}], max_prompt_tokens=8, max_response_tokens=8)
stages = StageRunner(RunContext(Path(sys.argv[1]), LaunchConfig(processes=1)))
for line in sys.stdin:
    try:
        print(base_model(BaseModelConfig(**json.loads(line)), split, 0, stages), flush=True)
    except PipelineError as error:
        print("error: " + str(error).replace(chr(10), " "), flush=True)
"""
"""Runs in another process: huggingface_hub reads the environment when it is imported."""


def fetch(endpoint, folder, *configurations):
    """Return the artifact or the error of each configuration."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "workspace")],
        input="\n".join(map(json.dumps, configurations)),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "home")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_a_moved_branch_is_another_base_model(make_model, tmp_path):
    repository = tmp_path / "hub" / "lab" / "tiny"
    old, new = COMMITS["main"], "3" * 40
    for commit, seed in ((old, 1), (new, 2)):
        shutil.copytree(make_model("llama", seed=seed), repository / commit)
    with serving(tmp_path / "hub") as hub:
        first, again = fetch(
            hub.address, tmp_path, {"path": "lab/tiny"}, {"path": "lab/tiny", "revision": None}
        )
        hub.commits["main"] = new
        moved, pinned, missing = fetch(
            hub.address, tmp_path,
            {"path": "lab/tiny"}, {"path": "lab/tiny", "revision": old}, {"path": "lab/none"},
        )  # fmt: skip
    assert first == again != moved
    assert hub.revisions == {old, new}  # files are read by commit, never by branch
    for made, commit in ((first, old), (moved, new), (pinned, old)):
        found, expected = (
            load_policy(path, "fp32").state_dict() for path in (Path(made), repository / commit)
        )
        assert all(found[name].equal(value) for name, value in expected.items())
    assert missing.startswith(
        "error: base_model.path: the hub did not return the commit of 'lab/none' at its default "
    )
    nowhere = "http://127.0.0.1:9"
    (unreached,) = fetch(nowhere, tmp_path, {"path": "lab/tiny"})
    assert "check the spelling and the network, or set base_model.revision to a commit" in unreached
    assert fetch(nowhere, tmp_path, {"path": "lab/tiny", "revision": old}) == [pinned]
