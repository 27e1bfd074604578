"""The jobs of PPO and of distillation: their inputs, and what identifies these."""

from importlib import metadata
from pathlib import Path

import pytest

from rlhf_pipeline.config.policies import DistillConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import CallableReward, ModelReward, TrainedReward
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.loading import load_tokenizer
from rlhf_pipeline.pipelines.ppo import distill, ppo, reward_inputs
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, file_entries, json_digest
from rlhf_pipeline.stages.cache.fingerprint import library_version, recipe
from rlhf_pipeline.stages.job import RunContext

MODEL = {"optimizer": {"learning_rate": 1e-3}}
TRAINED = RewardModelConfig(epochs=1, batch_size=2, micro_batch_tokens=32, **MODEL)


class Fingerprints:
    """Returns fingerprints instead of running stages."""

    def run(self, job):
        digests = {name: content_digest(path) for name, path in job.inputs.items()}
        return json_digest(recipe(job, digests, RunContext(Path()), 1))


class Recorder:
    """Takes the jobs of a node; a teacher is where its job reads it."""

    def __init__(self):
        self.jobs = []

    def run(self, job):
        self.jobs.append(job)
        teacher = job.config.get("base_model")
        return Path(teacher.path) if teacher else Path("export")


@pytest.fixture
def key(tmp_path):
    """The stage's fingerprint for a split with some text, or without text."""

    def key(text, ptx):
        folder = tmp_path / str(text)
        for name, content in {"ppo": "prompts", "sft": "examples", "pretraining": text}.items():
            if content is not None:
                (folder / name).mkdir(parents=True, exist_ok=True)
                (folder / name / "train.arrow").write_text(content)
        Manifest("split", "", 0, {}, {}, {}, {}, file_entries(folder)).write(folder)
        config = PPOConfig(
            steps=1,
            rollout_batch_size=2,
            minibatch_size=2,
            micro_batch_tokens=32,
            actor=MODEL,
            critic=MODEL,
            ptx=ptx,
        )
        return ppo(folder, folder / "sft", folder / "sft", TRAINED, config, 0, Fingerprints())

    return key


def test_text_counts_only_with_the_ptx_loss(key):
    assert key("some", None) == key("other", None) == key(None, None)
    assert (
        len({key("some", {"batch_size": 2}), key("other", {"batch_size": 2}), key("some", None)})
        == 3
    )


def test_a_split_without_text_is_refused_with_the_ptx_loss(key):
    with pytest.raises(
        ArtifactError,
        match=r"pretraining is empty: .* run stage split with parameters that create it",
    ):
        key(None, {"batch_size": 2})


def test_the_version_of_vllm_is_part_of_the_recipe(tmp_path, monkeypatch):
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
    sizes = {"steps": 1, "rollout_batch_size": 2, "minibatch_size": 2, "micro_batch_tokens": 32}
    config = PPOConfig(**sizes, actor=MODEL, critic=MODEL, **changes)
    stages = Recorder()
    ppo(tmp_path, tmp_path, tmp_path, TRAINED, config, 0, stages)
    (job,) = stages.jobs
    assert job.config["ppo"].generator == expected
    assert ("vllm" in job.spec.libraries) == (expected == "vllm")
    assert config.generator == changes.get("generator", "auto")


def jobs_of(student, teacher, **fields):
    stages = Recorder()
    config = DistillConfig.model_validate({"teacher": str(teacher), **fields})
    assert distill(Path("split"), student, config, 7, stages) == Path("export")
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


def test_models_that_do_not_exist_yet_are_planned(make_model):
    _, trained = jobs_of(Path("/pending/sft"), make_model("llama"))
    assert trained.inputs["sft_model"] == Path("/pending/sft")


def digests(*rewards):
    paths, identities = reward_inputs(rewards)
    return {name: content_digest(path) for name, path in paths.items()} | identities


def test_the_trained_reward_model_adds_nothing():
    assert digests(TrainedReward()) == {}


def test_the_source_of_a_function_is_an_input(tmp_path, monkeypatch):
    file = tmp_path / "my_rewards.py"
    file.write_text("def f(prompts, responses): return [0.0 for _ in responses]")
    monkeypatch.syspath_prepend(str(tmp_path))
    by_file, by_module = (
        CallableReward(callable=f"{file}:f"),
        CallableReward(callable="my_rewards:f"),
    )
    before = digests(TrainedReward(), by_file, by_module)
    assert before.keys() == {"rewards.1", "rewards.2"}
    file.write_text("def f(prompts, responses): return [1.0 for _ in responses]")
    after = digests(TrainedReward(), by_file, by_module)
    assert all(after[name] != before[name] for name in before)


def test_a_reward_model_is_identified_by_its_bytes(tmp_path):
    def model(name: str, weights: str) -> ModelReward:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(weights)
        return ModelReward(path=str(tmp_path / name))

    one, other, changed = (digests(model(*pair)) for pair in (("a", "x"), ("b", "x"), ("c", "y")))
    assert one == other
    assert one.keys() == changed.keys() == {"rewards.0"} and one != changed


def test_a_reward_model_of_this_pipeline_is_an_input(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    files = file_entries(tmp_path)
    Manifest("reward_model", "f", 1, {}, {}, {}, {}, files).write(tmp_path)
    reward = ModelReward(path=str(tmp_path))
    assert reward_inputs([reward]) == ({"rewards.0": tmp_path}, {})
