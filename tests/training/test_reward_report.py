"""The report of a reward model, by hand and against the program."""

import json

import numpy as np
import pyarrow as pa
import pytest
from rank_fixtures import as_artifact, write_table
from tiny_jobs import MAIN, tiny_job, trained

from rlhf_pipeline.config.evaluate import FoldConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.batches import Rows
from rlhf_pipeline.training.reward_model import describe, rows_of_fold


def test_the_report_by_hand():
    """Margins 2, -1, 0, 3: three of four right with the tie as a half, so 2.5 / 4.

    The first source has 2 and -1, the second one 0 and 3. Even rows: 2 and 0; odd rows: -1 and 3.
    """
    scores = np.array([[2.0, 0.0], [0.0, 1.0], [5.0, 5.0], [4.0, 1.0]])
    tokens = np.array([[3, 1], [1, 2], [9, 9], [7, 2]])
    report = describe(["a", "a", "b:train", "b:train"], scores, tokens)
    assert (report["pairs"], report["margin"]) == (4, 1.0)
    assert (report["accuracy"]["rate"], report["accuracy"]["n"]) == (0.625, 4)
    assert report["accuracy"]["lower"] < 0.625 < report["accuracy"]["upper"]
    found = {name: rate["rate"] for name, rate in report["sources"].items()}
    assert found == {"a": 0.5, "b:train": 0.75}
    assert report["halves"] == [0.75, 0.5]
    # The longer answer is the chosen one but in the second pair; the third one is a tie for both.
    assert report["over_length"]["difference"] == 0.0
    shorter = describe(["a"] * 4, scores, tokens[:, ::-1])
    assert shorter["over_length"]["difference"] == 0.625 - 0.375
    # A third is of equal length: there, who prefers the longer answer is right half of the time.
    tied = describe(["a"] * 6, np.array([[1.0, 0.0]] * 6), np.array([[3, 3]] * 2 + [[4, 3]] * 4))
    assert tied["over_length"]["difference"] == pytest.approx(1 - 5 / 6)
    assert report["length_correlation"] > 0.9
    assert sum(each["n"] for each in report["calibration"]["bins"]) == 4
    json.dumps(report)


def test_one_pair_has_one_half():
    report = describe(["a"], np.array([[1.0, 0.0]]), np.array([[3, 3]]))
    assert report["halves"] == [1.0, None] and report["length_correlation"] is None


@pytest.fixture
def inputs(make_model, tmp_path):
    """A tiny SFT model and comparisons of two sources."""
    sft = make_model("llama", seed=1)
    rows = range(9)
    table = pa.table(
        {
            "id": [f"web:train:{i}" if i < 5 else f"books:{i}" for i in rows],
            "prompt_ids": [[5 + i] * (1 + i % 3) for i in rows],
            "chosen_ids": [[20 + i] * (i % 4) + [1] for i in rows],
            "rejected_ids": [[40 + i] * (i % 5) + [1] for i in rows],
        }
    )
    comparisons = write_table(table, tmp_path / "comparisons", TokenContract.read(sft))
    return {"sft_model": as_artifact(sft), "comparisons": comparisons}


def test_the_report_of_the_exported_model(inputs, world, tmp_path):
    """It agrees with the evaluation in training."""
    job = tiny_job("reward_model", inputs, tmp_path / "work", trained(0))
    metrics = MAIN["reward_model"](job)
    report = json.loads((job.export / "reward_report.json").read_text())
    for name, found in (
        ("accuracy", report["accuracy"]["rate"]),
        ("accuracy_lower", report["accuracy"]["lower"]),
        ("margin", report["margin"]),
        ("calibration_error", report["calibration"]["error"]),
        ("length_correlation", report["length_correlation"]),
        ("accuracy_half_2", report["halves"][1]),
    ):
        assert metrics[f"validation/{name}"] == pytest.approx(found, abs=1e-5)
    assert {name: rate["n"] for name, rate in report["sources"].items()} == {
        "books": 4,
        "web:train": 5,
    }


def test_no_fold_is_empty(inputs):
    """Nine prompts in nine folds: each has one of them."""
    file = inputs["comparisons"] / "validation.arrow"
    folds = [FoldConfig(number=number, of=9) for number in range(9)]
    assert [rows_of_fold(fold, file).num_rows for fold in folds] == [1] * 9


def test_each_comparison_is_held_out_by_one_of_the_folds(inputs):
    """Equal prompts are in one fold; nothing that a model is measured on is trained on."""
    file = inputs["comparisons"] / "train.arrow"
    everything = Rows.read(file).columns(np.arange(9))
    held_out, sizes = [], []
    for number in range(3):
        fold = FoldConfig(number=number, of=3)
        tables = [rows_of_fold(fold, file.with_name(f"{name}.arrow")) for name in
                  ("train", "validation")]  # fmt: skip
        train, validation = (table.columns(np.arange(table.num_rows)) for table in tables)
        asked = [{*map(tuple, rows["prompt_ids"])} for rows in (train, validation)]
        assert asked[0].isdisjoint(asked[1])
        held_out += validation["id"]
        sizes.append(len(train["id"]) + len(validation["id"]))
    assert sorted(held_out) == sorted(everything["id"]) and sizes == [9, 9, 9]
