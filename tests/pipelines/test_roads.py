"""From the base model by GRPO, rejection sampling, distillation, and PPO on another reward model.

The launches are real. One rank trains, because `tests/strict/test_programs.py` runs the same
programs on two; rejection sampling has two here.
"""

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.runtime.manifest import Manifest

pytestmark = pytest.mark.slow
CONF = Path(__file__).parents[2] / "conf"
SMALL = {"batch_size": 16, "micro_batch_tokens": 256, "evaluations": 1}
SHORT = {"max_response_tokens": 8}
STEPS = {
    "steps": 1, "rollout_batch_size": 16, "micro_batch_tokens": 256, "evaluations": 1,
    "evaluation_prompts": 8, "sampling": SHORT,
}  # fmt: skip
SPACES = "def spaces(prompts, responses):\n    return [one.count(' ') for one in responses]\n"


@pytest.fixture(scope="module")
def road(new_project, tmp_path_factory):
    """Makes a project with a file of rows and these parameters, in the environment `road`."""

    def road(rows: list[dict[str, str]], **parameters):
        folder = tmp_path_factory.mktemp("road")
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / "spaces.py").write_text(SPACES)
        shutil.copytree(CONF, folder / "conf")
        (folder / "conf" / "road").mkdir()
        source = {"name": "files", "path": str(folder / "rows.jsonl")}
        source |= parameters.pop("source", {})
        sizes = {"hidden_size": 32, "num_hidden_layers": 2}
        shared = {
            "base_model": {"vocab_size": 512, "architecture": sizes},
            "launch": {"processes": 1},
            "split": {"sources": [source], "validation_fraction": 0.1, "test_fraction": 0.2},
            "evaluate": {"prompts": 8, "best_of_n": 2, "sampling": SHORT},
        }
        text = json.dumps(shared | parameters).replace("SPACES", str(folder / "spaces.py"))
        (folder / "conf" / "road" / "parameters.yml").write_text(text)  # JSON is YAML
        own = new_project(folder / "root")

        def kedro(*arguments, **options) -> str:
            return own.kedro(f"--conf-source={folder / 'conf'}", *arguments, env="road", **options)

        return own, kedro

    return road


@pytest.fixture(scope="module")
def questions(road):
    """A project with a base model and 80 prompts whose answers can be checked."""
    return road(
        [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(80)],
        source={"columns": {"prompt": "question", "reference": "answer"}},
        sft=None,
        reward_model=None,
        ppo=None,
        # A random model is never right; it must learn something.
        grpo={**STEPS, "minibatch_size": 16,
              "rewards": [{"reference": "last_number"}, {"regex": "[a-m]"}]},
        rejection={
            # A random model hardly ever ends its answer.
            "sample": {"n": 4, "prompts": 32, "rewards": ["SPACES:spaces"], "cut_answers": "keep",
                       "sampling": SHORT},
            **SMALL, "epochs": 6, "optimizer": {"learning_rate": 1e-2},
        },
        distill={
            **STEPS, "teacher": "some/model", "steps": 40, "rollout_batch_size": 32,
            "minibatch_size": 32, "micro_batch_tokens": 512, "evaluations": 2,
            "actor": {"optimizer": {"learning_rate": 2e-2}},
        },
    )  # fmt: skip


def evaluation_of(own, policy: str) -> dict:
    folder = own.newest(f"08_reporting/{policy}_evaluation")
    return json.loads((folder / "evaluation.json").read_text())


def test_grpo_needs_a_model_and_prompts_whose_answers_can_be_checked(questions):
    own, kedro = questions
    output = kedro("--pipeline=grpo")
    evaluation = evaluation_of(own, "grpo")
    assert list(evaluation["policies"]) == ["base_model", "grpo"]
    assert evaluation["judge"] == "last_number"
    assert evaluation["judges"]["last_number"]["state"] == "optimized"
    assert evaluation["rewards"] == ["last_number", "regex"]
    assert list(evaluation["win_rates"]) == ["last_number", "regex"]
    assert "best_of_n" in evaluation
    assert "GRPO's answer to the base model's" in " ".join(output.split())
    page = own.newest("08_reporting/grpo_evaluation.html").read_text()
    assert "GRPO was trained to maximize the score of last_number and regex" in page
    assert "SFT" not in page
    baseline = own.newest("06_models/sft_model")
    assert Manifest.read(baseline).stage == "base_model"
    base_model = own.recipes("base_model")[0] / "export"
    assert (baseline / "config.json").samefile(base_model / "config.json")  # a hard link
    # The published inputs of a part of the pipeline come from the same parameters.
    assert "grpo: reused" in kedro("--pipeline=grpo", "--from-nodes=grpo")
    status = kedro("--pipeline=grpo", command="rlhf status")
    assert "null: base_model is passed on" in status
    assert "can serve each phase: ppo 100%" in status


def test_rejection_trains_the_base_model_on_the_best_of_its_answers(questions):
    own, kedro = questions
    kedro("--pipeline=rejection", params="launch.processes=2")
    (sample,) = own.recipes("sample")
    lines = [json.loads(line) for line in (sample / "export" / "samples.jsonl").open()]
    training = [line for line in lines if line["part"] == "train"]
    assert len(training) == 32
    for line in lines:
        assert line["scores"] == [response.count(" ") for response in line["responses"]]
        (best,) = line["chosen"]
        assert line["scores"].index(max(line["scores"])) == best
    with pa.ipc.open_stream(sample / "export" / "train.arrow") as stream:
        rows = stream.read_all().to_pylist()
    assert [row["id"] for row in rows] == [line["id"] for line in training]
    assert all(row["loss_mask"] == [True] * 8 for row in rows)
    metrics = Manifest.read(sample / "export").metrics
    assert metrics["sample/chosen_score"] > metrics["sample/score"]
    evaluation = evaluation_of(own, "rejection")
    assert list(evaluation["policies"]) == ["base_model", "rejection"]
    assert (evaluation["judge"], evaluation["rewards"]) == ("spaces", ["spaces"])
    scores = [each["spaces_score"] for each in evaluation["policies"].values()]
    assert scores[1] > scores[0]


def teacher_like(base_model: Path, folder: Path) -> Path:
    """A larger model with a base model's tokenizer, which prefers some tokens in any context."""
    torch.manual_seed(7)
    config = AutoConfig.from_pretrained(
        base_model, num_hidden_layers=3, tie_word_embeddings=False, initializer_range=0.3
    )
    model = AutoModelForCausalLM.from_config(config)
    inputs = model.get_input_embeddings().weight.data
    inputs[:] = inputs[0]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base_model).save_pretrained(folder)
    return folder


def test_distill_moves_the_base_model_to_a_larger_teacher(questions, tmp_path):
    own, kedro = questions
    if not (own.root / "07_workspace").exists():
        kedro("--pipeline=data_preparation")
    teacher = teacher_like(own.recipes("base_model")[0] / "export", tmp_path / "teacher")
    options = {"params": f"distill.teacher={teacher},evaluate.judges=[{{regex: '1'}}]"}
    output = kedro("--pipeline=distill", **options)
    assert "teacher: finished" in output and "distill: finished" in output
    student = own.newest("06_models/distill_model")
    records = [json.loads(line)["metrics"] for line in (student / "metrics.jsonl").open()]
    assert records[0]["objective/kl"] > 1
    assert records[-1]["validation/kl"] < 0.4
    assert Manifest.read(student).metrics["validation/kl"] < 0.4
    config = json.loads((own.recipes("teacher")[0] / "export" / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    assert list(evaluation_of(own, "distill")["policies"]) == ["base_model", "distill"]
    page = own.newest("08_reporting/distill_evaluation.html").read_text()
    assert "KL from the reference" in page
    # The teacher was trained elsewhere, perhaps on this judge.
    assert "Nobody recorded whether the training of distillation optimized this judge" in page
    assert "KL from SFT, nats per response" not in page
    plan = json.loads(kedro("--pipeline=distill", "--json", command="rlhf plan", **options))
    sizes = plan["stages"][0]["models"]
    assert sizes["distill.reference"]["weights"] > 1.4 * sizes["distill.actor"]["weights"]
    (teacher / "notes.txt").write_text("other bytes")
    status = kedro("--pipeline=distill", command="rlhf status", **options)
    assert re.search(r"teacher +run +\w+ +input bytes changed", status), status


def test_ppo_on_a_reward_model_of_another_family_size_and_tokenizer(road):
    """A second one, which judges, is made from the same start; the critic is the policy's size."""
    small = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}
    own, kedro = road(
        [
            {"prompt": f"What is {n} + 1?", "chosen": f"It is {n + 1}.", "rejected": "No."}
            for n in range(300)
        ],
        sft={**SMALL, "epochs": 1},
        reward_model={**SMALL, "gate": None, "start": "own",
                      "base_model": {"vocab_size": 300, "architecture": small}},
        ppo={**STEPS, "ppo_epochs": 1, "critic": {"start": "policy"}},
        evaluate={"prompts": 8, "sampling": SHORT, "judge_model": {"held_back": 0.3}},
    )  # fmt: skip
    kedro("--pipeline=full")
    split, trained = own.newest("03_split/split"), own.newest("06_models/reward_model")
    folders = ["reward_model", "reward_model_own", "judge_model"]
    of_policy, of_reward, of_judge = (TokenContract.read(split / name) for name in folders)
    assert of_policy == TokenContract.read(own.newest("06_models/sft_model"))
    assert of_reward == of_judge == TokenContract.read(trained) != of_policy
    config = json.loads((trained / "config.json").read_text())
    assert (config["model_type"], config["n_embd"]) == ("gpt2", 16)
    stages = [record["stage"] for record in Manifest.read(trained).lineage]
    assert "reward_base" in stages and "sft" not in stages
    (ppo,) = own.recipes("ppo")
    inputs = json.loads((ppo / "job.json").read_text())["inputs"]
    assert {"reward_model", "sft_model"} <= inputs.keys()
    folder = own.newest("08_reporting/evaluation")
    evaluation = json.loads((folder / "evaluation.json").read_text())
    states = {name: one["state"] for name, one in evaluation["judges"].items()}
    assert states["score"] == "optimized" and states["judge_model"] == "independent"
    status = kedro("--pipeline=full", command="rlhf status")
    assert re.search(r"reward_base +finished", status), status
    assert "ppo: reused" in kedro("--pipeline=full", "--from-nodes=ppo")
    refused = kedro("--pipeline=full", params="ppo.critic.start=reward_model", check=False)
    assert "ppo.critic.start: found reward_model, but reward_model.base_model has" in refused
