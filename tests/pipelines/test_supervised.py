"""What the reward model starts from."""

import pytest

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.pipelines.supervised import reward_model

TRAINED = {
    "epochs": 1,
    "batch_size": 8,
    "micro_batch_tokens": 64,
    "optimizer": {"learning_rate": 1e-3},
}

DATA = {"sources": [{"name": "synthetic"}], "max_prompt_tokens": 8, "max_response_tokens": 8}


class Recorder:
    """Runs nothing; the export of a stage is a folder with its name."""

    def __init__(self, folder):
        self.folder, self.jobs = folder, {}

    def run(self, job):
        self.jobs[job.spec.name] = job
        return self.folder / job.spec.name


@pytest.mark.parametrize(
    ("start", "expected"), [("sft", {"sft_model": "sft"}), ("base", {"base_model": "base"})]
)
def test_a_reward_model_gets_its_head_on_the_model_that_start_names(tmp_path, start, expected):
    stages = Recorder(tmp_path)
    data = SplitConfig.model_validate(DATA)
    config = RewardModelConfig.model_validate(TRAINED | {"start": start})
    folders = [tmp_path / name for name in ("base", "split", "sft")]
    assert reward_model(*folders, data, config, 1, stages) == tmp_path / "reward_model"
    found = {name: path.name for name, path in stages.jobs["reward_model"].inputs.items()}
    assert found == {"comparisons": "reward_model", **expected}
