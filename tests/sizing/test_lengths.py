"""Rows and tokens of each phase."""

import json

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.sizing.work import Lengths, limits, measured

SPLIT = SplitConfig.model_validate(
    {"sources": [{"name": "synthetic", "samples": 1000}], "weights": [2, 4, 4],
     "validation_fraction": 0.05, "test_fraction": 0.15, "max_prompt_tokens": 64,
     "max_response_tokens": 48}
)  # fmt: skip


def publish(folder, split):
    artifact = folder / "2026-01-01T00.00.00.000Z" / folder.name
    artifact.mkdir(parents=True)
    columns = {"sft": ["response_ids"], "reward_model": ["chosen_ids", "rejected_ids"], "ppo": []}
    files = {
        f"{phase}/train.arrow": {
            "rows": 100,
            "tokens": {"prompt_ids": {"total": 2000, "max": 30}}
            | {name: {"total": 1500, "max": 40} for name in names},
        }
        for phase, names in columns.items()
    }
    (artifact / "report.json").write_text(json.dumps({"files": files}))
    config = {"split": split.model_dump(mode="json")}
    Manifest("split", "f" * 64, 1, config, {}, {}, {}, {}).write(artifact)


def test_limits_are_upper_bounds():
    found = limits(SPLIT)
    assert found["sft"] == Lengths(160, 64, 48, 64, 48)  # 1000 * 0.8 * 0.2
    assert found["reward_model"].row == found["reward_model"].longest == 2 * (64 + 48)
    assert found["ppo"].row == 64


def test_rows_without_a_number_of_samples_are_not_known():
    source = {"name": "synthetic", "samples": 5}
    split = SPLIT.model_copy(update={"sources": [*SPLIT.sources, *SPLIT.sources]})
    assert limits(split)["sft"].rows == 320
    other = SplitConfig.model_validate(
        SPLIT.model_dump() | {"sources": [source, {"name": "Anthropic/hh-rlhf"}]}
    )
    assert limits(other)["sft"].rows is None


def test_a_published_split_says_its_own(tmp_path):
    folder = tmp_path / "split"
    assert measured(folder, SPLIT) is None
    publish(folder, SPLIT)
    found = measured(folder, SPLIT)
    assert found["sft"] == Lengths(100, 20, 15, 30, 40)
    assert found["reward_model"] == Lengths(100, 20, 30, 30, 80, copies=2)
    assert found["ppo"] == Lengths(100, 20, 0, 30, 0)


def test_a_phase_without_rows_has_the_limits_of_its_parameters(tmp_path):
    """Weight 0, for example without PPO: the report has neither rows nor tokens."""
    folder = tmp_path / "split"
    publish(folder, SPLIT)
    (report,) = folder.rglob("report.json")
    found = json.loads(report.read_text())
    found["files"]["ppo/train.arrow"] = {"rows": 0, "tokens": {}}
    report.write_text(json.dumps(found))
    lengths = measured(folder, SPLIT)
    assert lengths["sft"] == Lengths(100, 20, 15, 30, 40)
    assert lengths["ppo"] == limits(SPLIT)["ppo"]


def test_a_split_of_other_parameters_does_not_count(tmp_path):
    publish(tmp_path / "split", SPLIT)
    other = SPLIT.model_copy(update={"max_prompt_tokens": 32})
    assert measured(tmp_path / "split", other) is None
