"""The second reward model: its comparisons and its folds."""

from pathlib import Path

import pytest

from rlhf_pipeline.config.evaluate import JudgeModelConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.pipelines.judge_model import judge_models

TRAINED = RewardModelConfig(epochs=1, batch_size=8, optimizer={"learning_rate": 1e-3})
DATA = SplitConfig(
    sources=[{"name": "synthetic"}], max_prompt_tokens=8, max_response_tokens=8, held_back=0.5
)


class Stages:
    """Takes the jobs of a node instead of running them."""

    def __init__(self, folder):
        self.folder, self.jobs = folder, []

    def run(self, job):
        self.jobs.append(job)
        made = self.folder / job.spec.name / str(len(self.jobs))
        made.mkdir(parents=True)
        (made / "counts.json").write_text('{"rows": 1}')  # of a source
        return made


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes the judge of a block: its models, and the jobs that trained them."""
    monkeypatch.chdir(tmp_path)
    Path("careful.jsonl").write_text('{"q": "?", "good": "a", "bad": "b"}')

    def make(**block):
        stages = Stages(tmp_path)
        given = JudgeModelConfig.model_validate(block), TRAINED, DATA, 7, stages
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
    assert {job.inputs["comparisons"] for job in jobs} == {
        Path.cwd() / "judge_split/2/reward_model"
    }


def test_the_number_of_passes_is_a_parameter(made):
    for block in ({"held_back": 0.5}, {"path": "careful.jsonl"}):
        _, jobs = made(**block, epochs=3)
        assert jobs[-1].config["reward_model"].epochs == 3


@pytest.mark.parametrize("block", [{}, {"held_back": 0.5, "path": "x.jsonl"}])
def test_one_of_both_is_needed(block):
    with pytest.raises(ValueError, match="expected one of held_back and path"):
        JudgeModelConfig.model_validate(block)
