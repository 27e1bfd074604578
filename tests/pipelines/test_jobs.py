"""The jobs of nodes, which nothing launches here: inputs and blocks, and what identifies them.

Also the page, which the last node makes.
"""

from importlib import metadata
from pathlib import Path

import pytest

from rlhf_pipeline.config.evaluate import EvaluateConfig, JudgeModelConfig
from rlhf_pipeline.config.policies import DistillConfig, GRPOConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import CallableReward, ModelReward, TrainedReward
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import ArtifactError, ConfigError, PipelineError
from rlhf_pipeline.models.loading import load_tokenizer
from rlhf_pipeline.pipelines.evaluate import CHAMPION, evaluate, judge_models, report
from rlhf_pipeline.pipelines.ppo import PPO, distill, ppo, reward_inputs
from rlhf_pipeline.pipelines.supervised import DPO, reward_model
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, file_entries, json_digest
from rlhf_pipeline.stages.cache.fingerprint import library_version, recipe
from rlhf_pipeline.stages.job import RunContext

MODEL = {"optimizer": {"learning_rate": 1e-3}}
TRAINED = RewardModelConfig(epochs=1, batch_size=2, micro_batch_tokens=32, **MODEL)
DATA = SplitConfig(sources=[{"name": "synthetic"}], max_prompt_tokens=8, max_response_tokens=8)
SIZES = {"steps": 1, "rollout_batch_size": 2, "minibatch_size": 2, "micro_batch_tokens": 32}


class Recorder:
    """Takes the jobs of a node instead of running them.

    The result of a stage is a folder with its name; a teacher is where its job reads it.
    """

    def __init__(self, folder=Path()):
        self.folder, self.jobs = folder, []

    def run(self, job):
        self.jobs.append(job)
        if job.spec.name == "source":
            (self.folder / "source").mkdir(exist_ok=True)
            (self.folder / "source" / "counts.json").write_text('{"rows": 1}')
        teacher = job.config.get("base_model")
        return Path(teacher.path) if teacher else self.folder / job.spec.name


class Fingerprints:
    """Returns fingerprints instead of running stages."""

    def run(self, job):
        digests = {name: content_digest(path) for name, path in job.inputs.items()}
        return json_digest(recipe(job, digests, RunContext(Path()), 1))


@pytest.mark.parametrize(
    ("start", "expected"), [("sft", {"sft_model": "sft"}), ("base", {"base_model": "base"})]
)
def test_a_reward_model_gets_its_head_on_the_model_that_start_names(start, expected):
    stages, folders = Recorder(), [Path(name) for name in ("base", "split", "sft")]
    config = TRAINED.model_copy(update={"start": start})
    assert reward_model(*folders, DATA, config, 1, stages) == Path("reward_model")
    found = {name: path.name for name, path in stages.jobs[0].inputs.items()}
    assert found == {"comparisons": "reward_model", **expected}


def test_text_counts_only_with_the_ptx_loss_which_needs_it(tmp_path):
    def key(text, ptx):
        """The stage's fingerprint for a split with some text, or without text."""
        folder = tmp_path / str(text)
        for name, content in {"ppo": "prompts", "sft": "examples", "pretraining": text}.items():
            if content is not None:
                (folder / name).mkdir(parents=True, exist_ok=True)
                (folder / name / "train.arrow").write_text(content)
        Manifest("split", "", 0, {}, {}, {}, {}, file_entries(folder)).write(folder)
        config = PPOConfig(**SIZES, actor=MODEL, critic=MODEL, ptx=ptx)
        return ppo(folder, folder / "sft", folder / "sft", TRAINED, config, 0, Fingerprints())

    assert key("some", None) == key("other", None) == key(None, None)
    loss = {"batch_size": 2}
    assert len({key("some", loss), key("other", loss), key("some", None)}) == 3
    message = r"pretraining is empty: .* run stage split with parameters that create it"
    with pytest.raises(ArtifactError, match=message):
        key(None, loss)


def test_the_version_of_vllm_is_part_of_the_recipe(monkeypatch):
    """Its package has another name on machines without a GPU."""
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"vllm": ["pytest"]})
    assert library_version.__wrapped__("vllm") == pytest.__version__


@pytest.mark.parametrize(
    ("installed", "gpus", "changes", "expected"),
    [
        (True, "0", {}, "vllm"),
        (True, "", {}, "auto"),  # transformers
        (False, "0", {}, "auto"),
        (True, "0", {"gather_for_generation": False}, "auto"),  # which vLLM cannot do
        (True, "0", {"generator": "transformers"}, "transformers"),
        (True, "", {"generator": "vllm"}, "vllm"),
    ],
)
def test_auto_is_vllm_where_it_is_installed_and_a_gpu_is_there(
    tmp_path, monkeypatch, installed, gpus, changes, expected
):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr("rlhf_pipeline.pipelines.ppo.find_spec", {"vllm": installed or None}.get)
    config = PPOConfig(**SIZES, actor=MODEL, critic=MODEL, **changes)
    stages = Recorder()
    ppo(tmp_path, tmp_path, tmp_path, TRAINED, config, 0, stages)
    (job,) = stages.jobs
    assert job.config["ppo"].generator == expected
    assert ("vllm" in job.spec.libraries) == (expected == "vllm")
    assert config.generator == changes.get("generator", "auto")


def jobs_of(student, teacher, **fields):
    stages = Recorder()
    config = DistillConfig.model_validate({"teacher": str(teacher), **fields})
    assert distill(Path("split"), student, config, 7, stages) == Path("distill")
    return stages.jobs


def test_the_bytes_of_the_teacher_identify_its_stage_whose_result_is_an_input(
    make_model, monkeypatch
):
    student, teacher = make_model("llama"), make_model("llama", num_hidden_layers=3)
    fetched, trained = jobs_of(student, teacher)
    assert fetched.spec.name == "teacher" and fetched.inputs == {}
    assert trained.spec.name == "distill" and trained.seed == 7
    inputs = {"prompts": Path("split/ppo"), "sft_model": student, "teacher": teacher}
    assert trained.inputs == inputs
    (teacher / "notes.txt").write_text("other bytes")
    assert jobs_of(student, teacher)[0].identities != fetched.identities
    assert "vllm" in jobs_of(student, teacher, generator="vllm")[1].spec.libraries
    given = jobs_of(student, teacher, given_batch_size=2)[1].inputs
    assert given == inputs | {"demonstrations": Path("split/sft")}
    text = {"ptx": {"batch_size": 2}}
    assert jobs_of(student, teacher, **text)[1].inputs["pretraining"] == Path("split/pretraining")
    planned = jobs_of(Path("/pending/sft"), teacher)[1]  # a student that does not exist yet
    assert planned.inputs["sft_model"] == Path("/pending/sft")


def test_a_teacher_with_another_tokenizer_is_refused_before_the_launch(make_model):
    student, teacher = make_model("llama"), make_model("llama", seed=1)
    tokenizer = load_tokenizer(teacher)
    tokenizer.chat_template += " "
    TokenContract.of(tokenizer).write(teacher)
    with pytest.raises(ArtifactError) as error:
        jobs_of(student, teacher)
    message = str(error.value)
    assert "sft_model and distill.teacher use different tokenizers: chat_template_digest" in message
    assert str(student) in message and str(teacher) in message
    assert "Fix: choose a model with the policy's tokenizer and chat template" in message


def digests(*rewards):
    paths, identities = reward_inputs(rewards)
    return {name: content_digest(path) for name, path in paths.items()} | identities


def test_the_source_of_a_function_is_an_input(tmp_path, monkeypatch):
    file = tmp_path / "my_rewards.py"
    file.write_text("def f(prompts, responses): return [0.0 for _ in responses]")
    monkeypatch.syspath_prepend(str(tmp_path))
    by_file, by_module = (CallableReward(callable=f"{place}:f") for place in (file, "my_rewards"))
    before = digests(TrainedReward(), by_file, by_module)
    assert before.keys() == {"rewards.1", "rewards.2"}
    file.write_text("def f(prompts, responses): return [1.0 for _ in responses]")
    after = digests(TrainedReward(), by_file, by_module)
    assert all(after[name] != before[name] for name in before)


def test_a_reward_model_is_identified_by_its_bytes_and_one_of_this_pipeline_is_an_input(tmp_path):
    def model(name: str, weights: str) -> ModelReward:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(weights)
        return ModelReward(path=str(tmp_path / name))

    one, other, changed = (digests(model(*pair)) for pair in (("a", "x"), ("b", "x"), ("c", "y")))
    assert one == other
    assert one.keys() == changed.keys() == {"rewards.0"} and one != changed
    made = tmp_path / "a"
    Manifest("reward_model", "f", 1, {}, {}, {}, {}, file_entries(made)).write(made)
    assert reward_inputs([ModelReward(path=str(made))]) == ({"rewards.0": made}, {})


def job_of(policy, *, trained=TRAINED, block=None, stages=None, **config):
    stages = stages or Recorder()
    folders = [Path(name) for name in ("split", "sft", "candidate", "reward_model")]
    evaluate(policy)(*folders, trained, block, DATA, EvaluateConfig(**config), 7, stages)
    return stages.jobs[-1]


@pytest.mark.parametrize(("policy", "stage"), [(PPO, "evaluate"), (DPO, "evaluate_dpo")])
def test_the_candidate_brings_its_name(policy, stage):
    job = job_of(policy)
    assert job.spec.name == stage
    assert job.inputs == {
        "prompts": Path("split/evaluation"),
        "sft_rows": Path("split/sft"),
        "sft_model": Path("sft"),
        f"{policy.name}_model": Path("candidate"),
        "reward_model": Path("reward_model"),
    }
    assert job.config["candidate"].name == policy.name


def test_the_source_of_a_judge_is_an_input_and_one_without_a_file_is_refused(tmp_path):
    (tmp_path / "my.py").write_text("def f(prompts, responses): ...")
    job = job_of(PPO, judges=["json:dumps", f"{tmp_path}/my.py:f"])
    assert job.inputs["judges.0"].name == "__init__.py"
    assert job.inputs["judges.1"] == tmp_path / "my.py"
    with pytest.raises(ConfigError, match=r"missing\.py:f"):
        job_of(PPO, judges=["missing.py:f"])


def test_each_policy_does_the_tasks_before_the_evaluation(tmp_path):
    """By one process of its own, whose inputs are the files of the tasks; the champion does not."""
    (tmp_path / "own.yaml").write_text("task: own\ninclude: base.yaml")
    (tmp_path / "base.yaml").write_text("output_type: multiple_choice")
    tasks = {"names": ["arc_easy", str(tmp_path / "own.yaml")]}
    stages = Recorder()
    job = job_of(PPO, stages=stages, tasks=tasks, precision="bf16")
    done = [one for one in stages.jobs if one.spec.name == "tasks"]
    assert [one.inputs["policy"] for one in done] == [Path("sft"), Path("candidate")]
    for one in done:
        assert one.inputs["tasks.0"] == tmp_path / "own.yaml"
        assert one.inputs["tasks.1"] == tmp_path / "base.yaml"
        assert one.spec.libraries == (*PPO.libraries, "lm_eval") and not one.spec.distributed
        assert one.config["tasks"].names == tuple(tasks["names"])
        assert one.config["evaluate"].precision == "bf16"
    assert {"tasks.baseline", "tasks.candidate"} <= job.inputs.keys()
    job_of(CHAMPION, stages=(stages := Recorder()), tasks=tasks)
    assert [one.spec.name for one in stages.jobs] == ["evaluate_champion"]


@pytest.mark.parametrize("candidate", [PPO, CHAMPION])
def test_what_samples_the_answers_is_a_library(candidate):
    assert job_of(candidate, generator="vllm").spec.libraries == (*PPO.libraries, "vllm")
    assert "vllm" not in job_of(candidate).spec.libraries


def test_without_a_reward_model_the_rewards_judge_unless_there_are_judges():
    penalty = {"reference": "contains", "weight": -1}
    block = GRPOConfig(rewards=[{"reference": "exact", "weight": 2}, "json:dumps", penalty])
    job = job_of(PPO, trained=None, block=block)
    assert "reward_model" not in job.inputs
    assert [judge.label for judge in job.config["evaluate"].judges] == ["exact", "dumps"]
    assert "judges.1" in job.inputs
    job = job_of(PPO, trained=None, block=block, judges=[{"reference": "last_number"}])
    assert [judge.label for judge in job.config["evaluate"].judges] == ["last_number"]
    assert job_of(PPO, block=block).config["evaluate"].judges == ()


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes the judge of a block: its models, and the jobs that trained them."""
    monkeypatch.chdir(tmp_path)
    Path("careful.jsonl").write_text('{"q": "?", "good": "a", "bad": "b"}')

    def make(**block):
        stages = Recorder(tmp_path)
        data = DATA.model_copy(update={"held_back": 0.5})
        given = JudgeModelConfig.model_validate(block), TRAINED, data, 7, stages
        return judge_models(Path("/split"), Path("/sft"), *given), stages.jobs

    return make


def test_one_model_trains_on_what_was_held_back(made):
    models, (job,) = made(held_back=0.5)
    assert list(models) == ["judge_model.0"] and job.spec.name == "judge_model"
    assert job.inputs == {"comparisons": Path("/split/judge_model"), "sft_model": Path("/sft")}
    assert job.config == {"reward_model": TRAINED}
    _, (job,) = made(held_back=0.5, epochs=3)
    assert job.config["reward_model"].epochs == 3


def test_five_models_train_on_a_file_and_each_leaves_another_fifth_out(made):
    columns = {"chosen": "good", "rejected": "bad", "prompt": "q"}
    models, (source, rows, *jobs) = made(path="careful.jsonl", columns=columns)
    assert (source.spec.name, rows.spec.name) == ("source", "judge_split")
    split = rows.config["split"]
    assert split.weights == (0, 1, 0) and split.held_back == split.validation_fraction == 0
    assert [one.path for one in split.sources] == ["careful.jsonl"]
    assert split.sources[0].columns.chosen == "good"
    assert list(models) == [f"judge_model.{number}" for number in range(5)]
    folds = [job.config["fold"] for job in jobs]
    assert [(fold.number, fold.of) for fold in folds] == [(number, 5) for number in range(5)]
    assert {job.config["reward_model"].epochs for job in jobs} == {10}
    assert {job.inputs["comparisons"] for job in jobs} == {Path.cwd() / "judge_split/reward_model"}
    *_, job = made(path="careful.jsonl", epochs=3)[1]
    assert job.config["reward_model"].epochs == 3


@pytest.mark.parametrize("block", [{}, {"held_back": 0.5, "path": "x.jsonl"}])
def test_one_of_both_is_needed(block):
    with pytest.raises(ValueError, match="expected one of held_back and path"):
        JudgeModelConfig.model_validate(block)


def test_a_page_that_cannot_be_made_names_the_cause_and_the_command(tmp_path):
    (tmp_path / "evaluation.json").write_text("{}")
    models = [tmp_path / name for name in ("sft_model", "ppo_model", "reward_model")]
    fix = "evaluation and registration are complete. Fix: `kedro rlhf report` makes"
    with pytest.raises(PipelineError, match=fix) as failure:
        report(tmp_path, {}, *models, "workspace")
    cause = failure.value.__cause__
    assert f"found {type(cause).__name__} ({cause}), expected a page" in str(failure.value)
