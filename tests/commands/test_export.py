"""`kedro rlhf export`: what it writes loads without this project, anywhere, and is complete."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from fsspec.implementations.local import LocalFileSystem
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project
from peft import AutoPeftModelForCausalLM
from rich.console import Console
from transformers import AutoModelForCausalLM

from rlhf_pipeline.commands import export as module
from rlhf_pipeline.commands.export import publish
from rlhf_pipeline.commands.passport import SUMS, check
from rlhf_pipeline.config.training import LoRAConfig
from rlhf_pipeline.distributed.model_files import save_model
from rlhf_pipeline.errors import ArtifactError, ConfigError, StageError
from rlhf_pipeline.kedro_run.artifacts import Ledger
from rlhf_pipeline.models import export as export_program
from rlhf_pipeline.models.loading import load_policy, load_tokenizer
from rlhf_pipeline.models.lora import add_adapters, merged, trained_names, write_adapter

PROJECT = Path(__file__).parents[2]
LOGITS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
found = []
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template([{"role": "user", "content": "what is snow?"}],
        add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        found.append(model(**inputs).logits)
    print(model.generation_config.eos_token_id, model.dtype)
torch.save(found, sys.argv[1])
assert not any(name.startswith(("rlhf_pipeline", "kedro")) for name in sys.modules)
"""


@pytest.fixture
def here(monkeypatch):
    """Weights are converted in this process, which has loaded torch already."""

    def convert(source, target, settings):
        export_program.main(source, Path(target), **settings)

    monkeypatch.setattr(module, "_convert", convert)


@pytest.fixture
def export(tmp_path):
    """Exports a policy with the options of the command; returns what it prints."""
    bootstrap_project(PROJECT)
    root = {"root": str(tmp_path / "data")}
    with KedroSession.create(PROJECT, env="tiny", runtime_params=root) as session:
        catalog = session.load_context().catalog

        def export(policy, destination, **changes):
            console = Console(file=io.StringIO(), width=80)
            options = {"overwrite": False, "license_name": "unknown", "precision": None,
                       "max_shard_size": "5GB", "base": None}  # fmt: skip
            names = (str(policy), str(destination))
            module.export.callback(Ledger(catalog, PROJECT), console, names, **options | changes)
            return console.file.getvalue()

        yield export


def logits_elsewhere(tmp_path, *folders):
    """The logits of models that a process without this project loads; a line about each."""
    file = tmp_path / "logits.pt"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", LOGITS, file, *folders], cwd=tmp_path, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return torch.load(file), done.stdout.splitlines()


def logits_here(model, folder):
    text = "\n\nHuman: what is snow?\n\nAssistant:"
    ids = load_tokenizer(folder)(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model(ids).logits


def front_matter(folder):
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


def check_sums(folder):
    """The files that `sha256sum` has checked."""
    command = ["sha256sum", "--check", "--strict", SUMS]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return {line.removesuffix(": OK") for line in done.stdout.splitlines()}


@pytest.mark.slow
def test_a_clean_process_loads_the_same_model(published, export, tmp_path, request):
    target = tmp_path / "it's ~ a [strange] * name; $(touch x) & é"
    printed = export(published, target, max_shard_size="20KB", license_name="apache-2.0")
    assert printed.startswith(f"{published} is in {target}: ")
    files = {path.name for path in target.iterdir()}
    assert "model.safetensors.index.json" in files
    assert len([name for name in files if name.endswith(".safetensors")]) > 2
    assert check_sums(target) == files - {SUMS}
    stated = check(target)
    assert stated["policy"]["stage"] in stated["made_from"] and stated["gate"] is None
    assert not files & {"manifest.json", "token_contract.json"}
    assert front_matter(target)["license"] == "apache-2.0"
    # Nothing in it names a place on this machine.
    assert str(published.parent) not in "".join(
        path.read_text() for path in target.iterdir() if path.suffix in (".json", ".md", ".jinja")
    )

    with pytest.raises(ConfigError, match=f"found {len(files)} files, expected none"):
        export(published, target)
    first = shutil.copytree(target, f"{target} 1")
    request.getfixturevalue("here")
    export(published, target, overwrite=True, precision="bf16")
    found, lines = logits_elsewhere(tmp_path, first, target)
    for precision, logits in zip(("fp32", "bf16"), found, strict=True):
        assert torch.equal(logits, logits_here(load_policy(published, precision), published))
    assert lines == ["1 torch.float32", "1 torch.bfloat16"]
    assert not list(target.glob("*.index.json"))  # the shards of the first export are gone
    assert check_sums(target) == {path.name for path in target.iterdir()} - {SUMS}


@pytest.mark.slow
def test_lora_merged_and_as_an_adapter(here, make_model, publish, export, tmp_path):
    """A policy as a stage with LoRA exports it: merged, beside its adapter."""
    base, folder = make_model("llama"), tmp_path / "lora" / "export"
    model, config = load_policy(base, "fp32"), LoRAConfig()
    add_adapters(model, config)
    torch.manual_seed(2)
    parameters = dict(model.named_parameters())
    weights = {
        name: 0.1 * torch.randn_like(parameters[name].detach()) for name in trained_names(model)
    }
    write_adapter(model, weights, "sft_model", folder.parent / "adapter")
    whole = merged(load_policy(base, "fp32"), config, folder.parent / "adapter")
    save_model(whole, load_tokenizer(base), folder)
    shutil.move(folder.parent / "adapter", folder / "adapter")
    policy = publish(folder)
    export(policy, tmp_path / "merged")
    assert not (tmp_path / "merged" / "adapter").exists()

    export(policy, tmp_path / "adapter", base=str(base))
    whole, found = (
        logits_here(load.from_pretrained(tmp_path / name).eval(), policy)
        for load, name in ((AutoModelForCausalLM, "merged"), (AutoPeftModelForCausalLM, "adapter"))
    )
    assert torch.equal(whole, logits_here(load_policy(policy, "fp32"), policy))
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(found, logits_here(load_policy(base, "fp32"), base), atol=0.1)
    size = sum(file.stat().st_size for file in (tmp_path / "adapter").glob("*.safetensors"))
    assert size < (tmp_path / "merged" / "model.safetensors").stat().st_size
    assert front_matter(tmp_path / "adapter")["library_name"] == "peft"


@pytest.mark.slow
def test_what_cannot_be_exported(published, export, tmp_path):
    with pytest.raises(StageError, match=r"found no adapter_model\.safetensors.* --adapter"):
        export(published, tmp_path / "out", base="base")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match=r"found 'thesis\.tex', which no finished export lists"):
        export(published, tmp_path / "taken", overwrite=True)
    assert [path.name for path in tmp_path.glob("taken/*")] == ["thesis.tex"]
    assert not (tmp_path / "out").exists()
    changed = shutil.copytree(published, tmp_path / "changed")
    (changed / "generation_config.json").write_text("{}")
    with pytest.raises(ArtifactError, match="was changed after stage ppo"):
        export(changed, tmp_path / "out")


@pytest.mark.slow
def test_it_is_uploaded_to_s3_and_verified(here, published, export, bucket):
    assert "is in s3://bucket/mine" in export(published, "s3://bucket/mine")
    files = {path.name for path in (bucket / "mine").iterdir()}
    assert {"model.safetensors", "README.md"} < files == check_sums(bucket / "mine") | {SUMS}
    with pytest.raises(ConfigError, match=f"s3://bucket/mine: found {len(files)} files"):
        export(published, "s3://bucket/mine")


class Forgetful(LocalFileSystem):
    """A store that damages one file."""

    def put_file(self, local, remote, **options):
        super().put_file(local, remote, **options)
        if remote.endswith("b.txt"):
            Path(remote).write_text("2!")


def test_the_digests_come_last_and_only_if_every_byte_arrived(tmp_path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "a.txt").write_text("1")
    (source / "sub" / "b.txt").write_text("22")
    store = LocalFileSystem(auto_mkdir=True)
    assert publish(source, store, str(tmp_path / "good")) == 3
    # printf 1 | sha256sum; printf 22 | sha256sum
    assert (tmp_path / "good" / SUMS).read_text() == (
        "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b  a.txt\n"
        "785f3ec7eb32f30b90cd0fcf3657d388b5ff4297f2f9716ff66e9b69c05ddd09  sub/b.txt\n"
    )
    with pytest.raises(StageError, match=r"sub/b\.txt: found SHA-256 .* expected 785f3ec7eb32"):
        publish(source, Forgetful(auto_mkdir=True), str(tmp_path / "bad"))
    assert not (tmp_path / "bad" / SUMS).exists()
