"""Stage `split` as a launched program."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import imported, job_file

from rlhf_pipeline.data import split as module
from rlhf_pipeline.data.records import Example, Message, Text
from rlhf_pipeline.data.split_report import headline
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.pipelines.preparation import SPLIT as SPEC
from rlhf_pipeline.runtime.job import LaunchedJob, as_json
from rlhf_pipeline.runtime.manifest import Manifest, file_entries, verify
from rlhf_pipeline.stages.job import Job, RunContext
from rlhf_pipeline.stages.run import StageRunner

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(module.__file__).parents[2])}


@pytest.mark.slow
def test_the_stage_writes_data_report_and_token_contract(
    write_records, split_config, tokenizer, load, tmp_path
):
    base_model = tmp_path / "base_model"
    tokenizer.save_pretrained(base_model)
    contract = TokenContract.of(tokenizer)
    contract.write(base_model)
    inputs = {"base_model": base_model, "pretraining_0": write_records("texts", Text("~~~~"))}
    # Twelve sources of one prompt each; source_10 comes after source_9, not after source_1.
    for n in range(12):
        example = Example((Message("user", f"Question {n}?"),), "Yes.", "No.")
        inputs[f"source_{n}"] = write_records(f"own{n}", example)
    for folder in inputs.values():
        Manifest("", "", 0, {}, {}, {}, {}, file_entries(folder)).write(folder)
    job = Job(SPEC, {"split": split_config(count=12, texts=1, only="sft")}, inputs, 0)
    export = StageRunner(RunContext(tmp_path / "workspace")).run(job)
    ids = [one["id"] for one in load("sft/train.arrow", out=export)]
    assert ids == [f"own{n}:0" for n in range(12)]
    folders = {"sft", "reward_model", "ppo", "kto", "evaluation", "pretraining"}
    assert {path.name for path in export.iterdir() if path.is_dir()} == folders
    assert all(TokenContract.read(export / folder) == contract for folder in folders)
    report = json.loads((export / "report.json").read_text())
    assert report["distinct_prompts"]["sft"] == 12
    assert verify(export).metrics == headline(report)


CODE = """
import torch
from transformers import PreTrainedTokenizerFast
class OwnTokenizer(PreTrainedTokenizerFast): ...
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_code", [False, True])
def test_only_a_tokenizer_with_code_of_its_own_costs_the_import_of_torch(
    write_records, split_config, tokenizer, ten, tmp_path: Path, has_code: bool
) -> None:
    """So with both tokenizers, that of the policy and that of a reward model of its own base."""
    inputs = {"source_0": write_records("own", *ten)}
    for name in ("base_model", "reward_base"):
        inputs[name] = folder = tmp_path / name
        tokenizer.save_pretrained(folder)
        TokenContract.of(tokenizer).write(folder)
        tokenizer.add_tokens("penguins")  # the second one differs
    if has_code:
        (folder / "own.py").write_text(CODE)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings |= {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
        settings["tokenizer_class"] = "OwnTokenizer"
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    block = as_json({"split": split_config()})
    places = inputs, {}, tmp_path, 60.0
    job = LaunchedJob("split", "f", 0, block, *places, trust_remote_code=has_code)
    modules, done = imported(module.__spec__.name, job_file(job))
    assert "transformers.models.auto.tokenization_auto" in modules
    assert ("torch" in modules) == has_code
    assert has_code or not modules & {"sklearn", "scipy", "boto3"}
    assert has_code or done.stdout + done.stderr == ""  # not that PyTorch is missing
    assert (job.export / "sft" / "train.arrow").is_file()


# The peak of this process alone: `ru_maxrss` begins with the memory of the parent.
MEMORY = """
import sys
from pathlib import Path
from transformers import PreTrainedTokenizerFast
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.split import split_sources
from rlhf_pipeline.data.token_contract import Reader, TokenContract

config = SplitConfig(sources=[{"samples": 1}], max_prompt_tokens=1000, max_response_tokens=1000)
folder, tokenizer = Path(sys.argv[1]), PreTrainedTokenizerFast.from_pretrained(sys.argv[2])
places = {"output": folder / "out", "metrics_file": folder / "metrics"}
readers = [Reader(tokenizer, TokenContract.of(tokenizer))]
split_sources(config, readers, 0, sources=[folder], pretraining=[], **places)
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""


@pytest.mark.slow
def test_memory_hardly_grows_with_the_rows(write_records, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    def peak(rows):
        prompts = ((Message("user", f"{n} " + "a b " * 50),) for n in range(rows))
        examples = (Example(prompt, "yes " * 50, "no! " * 50) for prompt in prompts)
        folder = write_records(str(rows), *examples)
        command = [sys.executable, "-c", MEMORY, folder, tmp_path / "tokenizer"]
        done = subprocess.run(command, check=True, env=ENVIRONMENT, capture_output=True, text=True)
        return int(done.stdout) * 1024

    # Measured: 9 MB more, mostly the memory-mapped records; with the tokens of all rows in memory,
    # it would be 100 MB.
    assert peak(16_000) - peak(4_000) < 30_000_000
