"""The results of one run, for notebooks."""

import pytest

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.results import RunResults


@pytest.mark.slow
def test_a_run_has_the_models_that_its_evaluation_compared(project):
    run = RunResults.load(project.root)
    assert run.candidate == "ppo"
    assert sorted(run.models) == ["ppo", "reward_model", "sft"]
    assert run.models["sft"].parent.name == run.models["reward_model"].parent.name
    steps = [record["step"] for record in run.metrics("ppo")]
    assert steps == sorted(set(steps)) and steps[0] == 1
    assert RunResults.load(project.root, run.folder.parent.name) == run


def test_without_a_complete_run_the_message_names_the_folder_and_the_fix(tmp_path):
    with pytest.raises(ArtifactError, match=r"found no complete run\. Fix: `kedro run"):
        RunResults.load(tmp_path)
    with pytest.raises(ArtifactError, match="found no complete run 2026-01-01"):
        RunResults.load(tmp_path, "2026-01-01")
