"""The pipeline `full` by its command line: real launches on two CPU ranks, a real MLflow store."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.models.scalar_head import load_scores
from rlhf_pipeline.pipelines.table import stage_specs
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, verify
from rlhf_pipeline.stages.job import Job, RunContext
from rlhf_pipeline.stages.run import StageRunner

pytestmark = pytest.mark.slow
PROJECT = Path(__file__).parents[2]
STAGES = ["source", "base_model", "split", "sft", "reward_model", "ppo", "evaluate"]
FROM_PPO = "ppo.kl.coef=0.1,ppo.ema.decay=0.9"
"""Parameters of a second policy."""


def first_step(stage: Path) -> dict[str, float]:
    with (stage / "metrics.jsonl").open() as file:
        return json.loads(file.readline())["metrics"]


def evaluation_of(project) -> dict:
    folder = project.newest("08_reporting/evaluation")
    return json.loads((folder / "evaluation.json").read_text())


def test_every_artifact_is_published_and_the_weights_are_on_the_disk_once(project):
    """The published version is a hard link of the result in the workspace."""
    models = [f"06_models/{name}_model" for name in ("sft", "reward", "ppo")]
    data = ["02_base_model/base_model", "03_split/split"]
    for path in (*data, *models, "08_reporting/evaluation"):
        assert len(project.versions(path)) == 1
        verify(project.newest(path))
    assert not list(project.root.rglob("*.partial"))
    inodes = {path: path.stat().st_ino for path in project.root.rglob("*.safetensors")}
    published = {inode for path, inode in inodes.items() if "07_workspace" not in path.parts}
    assert published == {*inodes.values()}
    for stage in ("sft", "reward_model", "ppo"):
        assert not (project.recipes(stage)[0] / "checkpoints").exists()


READER = """
import json, sys, torch, transformers
for folder, kind in json.loads(sys.argv[1]).items():
    model, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        print(json.dumps([text["input_ids"].tolist(), model(**text).logits.tolist()]))
assert not any(name.startswith("rlhf_pipeline") for name in sys.modules)
"""


def test_exports_are_the_same_models_in_transformers(project, tmp_path):
    """transformers alone loads every key, and computes the logits that the next stage sees."""
    policy, classifier = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
    names = {"sft_model": policy, "ppo_model": policy, "reward_model": classifier}
    kinds = {str(project.newest(f"06_models/{name}")): kind for name, kind in names.items()}
    command = [sys.executable, "-c", READER, json.dumps(kinds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    for (folder, kind), line in zip(kinds.items(), done.stdout.splitlines(), strict=True):
        ids, logits = map(torch.tensor, json.loads(line))
        with torch.no_grad():
            if kind == classifier:
                given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                own = load_scores(Path(folder), "fp32")(**given, scores_to_keep=1)
            else:
                own = load_policy(Path(folder), "fp32")(input_ids=ids).logits
        torch.testing.assert_close(logits, own, rtol=1e-5, atol=1e-6)


def test_the_report_compares_both_policies(project):
    evaluation = evaluation_of(project)
    assert evaluation["prompts"] == 24
    assert evaluation["policies"]["sft"]["kl"] == pytest.approx(0.0, abs=1e-5)
    rates = {"eos_fraction", "distinct_1", "distinct_2"}
    metrics = {"score", "gold_score", "kl", "sft_perplexity", "response_tokens"} | rates
    assert metrics <= evaluation["policies"]["ppo"].keys()
    gold = evaluation["win_rates"]["gold"]
    assert gold["wins"] + gold["ties"] + gold["losses"] == 24
    page = project.newest("08_reporting/evaluation.html").read_text()
    assert "<h1>PPO is" in page and "Explained variance of the critic" in page
    assert f"{evaluation['prompts']} held-out prompts" in page
    own = Manifest.read(project.newest("08_reporting/evaluation")).fingerprint
    (logged,) = [run for run in project.runs() if run.data.tags.get("rlhf.fingerprint") == own]
    artifacts = project.client().list_artifacts(logged.info.run_id)
    assert "evaluation.html" in [file.path for file in artifacts]
    assert "evaluation.html" in project.output
    assert "prefers PPO's answer to SFT's on" in " ".join(project.output.split())
    assert "candidate = version 2, sft-baseline = version 1" in project.output


def test_mlflow_holds_a_parent_and_a_child_for_each_stage(project):
    runs = project.runs()
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = {
        run.data.tags["rlhf.stage"]: run for run in runs if "mlflow.parentRunId" in run.data.tags
    }
    full = [run for run in parents if run.info.run_name.startswith("full tiny")]
    assert len(full) == 1 and full[0].info.status == "FINISHED"
    assert sorted(children) == sorted(STAGES)
    assert {run.info.status for run in children.values()} == {"FINISHED"}
    for name, first in {"objective/kl": 0.0, "policy/ratio": 1.0}.items():
        history = project.client().get_metric_history(children["ppo"].info.run_id, name)
        assert [point.step for point in history][:3] == [1, 2, 3]
        assert history[0].value == pytest.approx(first, abs=1e-6)
    assert children["ppo"].data.params["ppo.kl.coef"] == "0.3"


def test_the_registry_holds_both_policies_side_by_side(project):
    client = project.client()
    baseline = client.get_model_version_by_alias("rlhf-policy-tiny", "sft-baseline")
    candidate = client.get_model_version_by_alias("rlhf-policy-tiny", "candidate")
    assert baseline.version != candidate.version
    assert Path(candidate.source) == project.newest("06_models/ppo_model")
    for version in (baseline, candidate):
        assert "eval/gold_score" in client.get_run(version.run_id).data.metrics
    assert baseline.run_id != candidate.run_id


@pytest.mark.parametrize(
    ("stage", "block", "names"),
    [
        pytest.param("reward_model", RewardModelConfig, ["reward_model/loss"],
                     marks=pytest.mark.long),
        ("ppo", PPOConfig, ["objective/score", "objective/kl", "value/loss", "policy/entropy",
                            "rollout/response_tokens"]),
    ],
)  # fmt: skip
def test_one_rank_and_two_ranks_start_alike(project, tmp_path, stage, block, names):
    """The losses of the first step agree to 1e-5 on the same global batch."""
    done = json.loads((project.recipes(stage)[0] / "job.json").read_text())
    inputs = {name: Path(path) for name, path in done["inputs"].items()}
    config = {stage: block.model_validate(done["config"][stage])}
    alone = StageRunner(RunContext(tmp_path, LaunchConfig(processes=1)))
    export = alone.run(Job(stage_specs()[stage], config, inputs, done["seed"]))
    one, two = (first_step(each) for each in (export.parent, project.recipes(stage)[0]))
    for name in names:
        assert one[name] == pytest.approx(two[name], rel=1e-5, abs=1e-6), name


@pytest.mark.cold
def test_from_ppo_on_only_ppo_trains_again(project):
    before = {stage: [path.name for path in project.recipes(stage)] for stage in STAGES}
    predicted = project.kedro(params=FROM_PPO, command="rlhf status")
    assert re.findall(r"^(\w+) .*?  (run|may run|resume|fail)  ", predicted, re.MULTILINE) == [
        ("ppo", "run"), ("evaluate", "may run"), ("register", "run"), ("report", "run"),
    ]  # fmt: skip
    output = project.kedro("--from-nodes=ppo", params=FROM_PPO)
    after = {stage: [path.name for path in project.recipes(stage)] for stage in STAGES}
    assert {stage for stage in STAGES if after[stage] != before[stage]} == {"ppo", "evaluate"}
    assert len(project.versions("06_models/ppo_model")) == 2
    assert len(project.versions("06_models/sft_model")) == 1
    before_the_verdict = output.split("By the gold judge")[0]
    assert "ppo: running" in output and "sft" not in before_the_verdict.replace("sft/score", "")
    manifest = Manifest.read(project.newest("06_models/ppo_model"))
    assert manifest.config["ppo"]["kl"]["coef"] == 0.1
    assert manifest.inputs["sft_model"] == content_digest(project.newest("06_models/sft_model"))
    assert manifest.deepspeed["critic"]["zero_optimization"]["stage"] == 1
    assert manifest.config["ppo"]["generator"] == "auto"


def test_the_average_of_the_weights_is_evaluated_beside_the_actor(project):
    """The run from ppo on exported the average as a separate model."""
    evaluation = evaluation_of(project)
    assert evaluation["variants"]["ppo_ema"]["gold"]["n"] == 24
    assert evaluation["policies"]["ppo_ema"]["kl"] != evaluation["policies"]["ppo"]["kl"]
    actor = project.newest("06_models/ppo_model")
    assert content_digest(actor) != content_digest(actor / "ema")
    AutoModelForCausalLM.from_pretrained(actor / "ema")


def test_an_unchanged_run_launches_nothing_and_imports_no_training_stack(project, monkeypatch):
    """Imports take most of the time of such a run."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")

    def launches():
        logs = [path / "program.log" for stage in STAGES for path in project.recipes(stage)]
        return {log: log.stat().st_mtime_ns for log in logs}

    before = launches()
    output = project.kedro("--pipelines=full")
    assert output.count("finished earlier") == 8  # base_model and split both run the source
    assert launches() == before
    versions = project.client().search_model_versions("name = 'rlhf-policy-tiny'")
    assert len(versions) <= 3  # none was added by this run
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", output, re.MULTILINE))
    assert "rlhf_pipeline.kedro_run.hooks" in imported
    heavy = "torch transformers deepspeed datasets peft matplotlib mlflow.server"
    assert imported & {*heavy.split()} == set()


def test_another_policy_competes_with_the_champion(project):
    """The policy of `test_from_ppo_on_only_ppo_trains_again` is the champion."""
    output = project.kedro("--from-nodes=ppo", params=f"{FROM_PPO},register.promote=always")
    assert "champion = version 3" in output and "(register.promote: always)" in output
    output = project.kedro("--pipelines=full")
    assert "evaluate_champion: finished" in output
    assert "not promoted: " in output
    assert "win rate against the champion by the gold judge: found" in output
    assert "evaluate_champion: reused" in project.kedro("--pipelines=full")
