"""The node `report`, after everything else."""

import pytest

from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.pipeline_registry import register_pipelines
from rlhf_pipeline.pipelines.report import report


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


@pytest.mark.parametrize(("name", "suffix"), [("full", ""), ("dpo", "_dpo")])
def test_only_the_page_follows_the_registration(name, suffix):
    pipeline = register_pipelines()[name]
    after = pipeline.from_nodes(f"register{suffix}")
    assert {node.name for node in after.nodes} == {f"register{suffix}", f"report{suffix}"}
    assert [node.name for node in pipeline.nodes][-1] == f"report{suffix}"
