"""The nodes after the training of a policy: the job of the evaluation, and the page."""

from pathlib import Path

import pytest

from rlhf_pipeline.config.evaluate import EvaluateConfig, JudgeModelConfig
from rlhf_pipeline.config.policies import GRPOConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.errors import ConfigError, PipelineError
from rlhf_pipeline.pipeline_registry import register_pipelines
from rlhf_pipeline.pipelines.evaluate import CHAMPION, evaluate, judge_models, report
from rlhf_pipeline.pipelines.ppo import PPO
from rlhf_pipeline.pipelines.supervised import DPO

TRAINED = RewardModelConfig(
    epochs=1, batch_size=2, micro_batch_tokens=32, optimizer={"learning_rate": 1e-3}
)
DATA = SplitConfig(sources=[{"name": "synthetic"}], max_prompt_tokens=8, max_response_tokens=8)


class Recorder:
    """Takes the jobs of a node instead of running them."""

    def __init__(self, folder=Path()):
        self.folder, self.jobs = folder, []

    def run(self, job):
        self.jobs.append(job)
        if job.spec.name == "source":
            (self.folder / "source").mkdir()
            (self.folder / "source" / "counts.json").write_text('{"rows": 1}')
        return self.folder / job.spec.name


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


def test_the_source_of_a_judge_is_an_input(tmp_path):
    (tmp_path / "my.py").write_text("def f(prompts, responses): ...")
    job = job_of(PPO, judges=["json:dumps", f"{tmp_path}/my.py:f"])
    assert job.inputs["judges.0"].name == "__init__.py"
    assert job.inputs["judges.1"] == tmp_path / "my.py"


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
        assert (one.inputs["tasks.0"], one.inputs["tasks.1"]) == (
            tmp_path / "own.yaml", tmp_path / "base.yaml",
        )  # fmt: skip
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


def test_a_judge_without_a_file_is_refused():
    with pytest.raises(ConfigError, match=r"missing\.py:f"):
        job_of(PPO, judges=["missing.py:f"])


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


@pytest.mark.parametrize(("name", "suffix"), [("full", ""), ("dpo", "_dpo")])
def test_only_the_page_follows_the_registration(name, suffix):
    pipeline = register_pipelines()[name]
    after = pipeline.from_nodes(f"register{suffix}")
    assert {node.name for node in after.nodes} == {f"register{suffix}", f"report{suffix}"}
    assert [node.name for node in pipeline.nodes][-1] == f"report{suffix}"


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


def test_five_models_train_on_a_file_and_each_leaves_another_fifth_out(made):
    models, (source, rows, *jobs) = made(path="careful.jsonl", columns={"chosen": "good",
                                         "rejected": "bad", "prompt": "q"})  # fmt: skip
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


def test_the_number_of_passes_is_a_parameter(made):
    for block in ({"held_back": 0.5}, {"path": "careful.jsonl"}):
        _, jobs = made(**block, epochs=3)
        assert jobs[-1].config["reward_model"].epochs == 3


@pytest.mark.parametrize("block", [{}, {"held_back": 0.5, "path": "x.jsonl"}])
def test_one_of_both_is_needed(block):
    with pytest.raises(ValueError, match="expected one of held_back and path"):
        JudgeModelConfig.model_validate(block)


def test_a_page_that_cannot_be_made_names_the_cause_and_the_command(tmp_path):
    (tmp_path / "evaluation.json").write_text("{}")
    models = [tmp_path / name for name in ("sft_model", "ppo_model", "reward_model")]
    with pytest.raises(
        PipelineError,
        match=r"evaluation and registration are complete. Fix: `kedro rlhf report` makes",
    ) as failure:
        report(tmp_path, {}, *models)
    cause = failure.value.__cause__
    assert f"found {type(cause).__name__} ({cause}), expected a page" in str(failure.value)
