"""`kedro rlhf prove`: what differs between two trainings is found and named."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from rlhf_pipeline.commands.prove import Observed, difference
from rlhf_pipeline.runtime.certificates import Certificate, certificate_of


@pytest.fixture
def observed(tmp_path):
    def make(name, weights, *steps, optimizer="o"):
        folder = tmp_path / name
        (folder / "export").mkdir(parents=True)
        save_file(weights, folder / "export" / "model.safetensors")
        digest = (folder / "export" / "model.safetensors").read_bytes().hex()
        return Observed(
            [{"step": n, "saw": saw, "metrics": given} for n, (saw, given) in enumerate(steps, 1)],
            {"model.safetensors": digest}, {"sft/rank0.safetensors": optimizer}, folder, 1.0,
        )  # fmt: skip

    return make


WEIGHTS = {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}
STEPS = [({"rows": 1, "samples": 2}, {"loss": 1.0}), ({"rows": 3, "samples": 4}, {"loss": 0.5})]


def changed(saw=None, loss=0.5):
    return [STEPS[0], ({"rows": 3, "samples": 4} | (saw or {}), {"loss": loss})]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (changed({"rows": 9}), "step 2: other rows: the order of the data is not restored"),
        (changed({"samples": 9}), "step 2: other answers to the same prompts: random draws or"),
        (changed(loss=0.6), "step 2: loss is 0.5 and 0.6, 16.7% apart: no rounding, so weights"),
        (changed(loss=0.5 + 1e-8), "apart, as by rounding: sums in another order. On GPUs, launch"),
        (STEPS[:1], "found 2 and 1 lines of metrics"),
    ],
)
def test_the_first_step_that_differs_is_named_with_its_cause(observed, steps, expected):
    first, other = observed("first", WEIGHTS, *STEPS), observed("other", WEIGHTS, *steps)
    assert difference(first, replace(first)) is None
    assert expected in difference(first, other)


@pytest.mark.parametrize(("name", "by"), [("a", "2.5e-01"), ("b", "1.0e+00")])
def test_the_first_tensor_that_differs_is_named(observed, name, by):
    moved = {key: each.clone() for key, each in WEIGHTS.items()}
    moved[name].view(-1)[1] += float(by)
    first, other = observed("first", WEIGHTS, *STEPS), observed("other", moved, *STEPS)
    expected = f"model.safetensors: the first tensor that differs is {name}, by {by}"
    assert difference(first, other) == expected


def test_a_state_of_the_optimizer_that_differs_is_named(observed):
    first = observed("first", WEIGHTS, *STEPS)
    other = observed("other", WEIGHTS, *STEPS, optimizer="p")
    assert "sft/rank0.safetensors of the last checkpoint differs" in difference(first, other)


def test_a_certificate_stands_for_trainings_of_another_length_alone(tmp_path):
    def config(**changes):
        return {
            "sft": {"epochs": 1, "log_every": 1, "gate": None, "optimizer": {"learning_rate": 0.1}}
            | changes
        }

    made = Certificate.of("sft", config(), {"torch": "2"}, 2, 7, {})
    made.note("resume", "killed after step 2", None)
    made.note("resume", "killed after step 3", "step 3: other rows")
    made.write(tmp_path)
    longer = config(epochs=9, log_every=5, gate=0.5)
    found = certificate_of(tmp_path, "sft", longer, {"torch": "2"}, 2)
    assert found.words("resume") == "1 of 2 equal"
    assert [*found.differences()] == ["sft, resume, killed after step 3: step 3: other rows"]
    others = [
        ("dpo", config(), {"torch": "2"}, 2), ("sft", config(), {"torch": "3"}, 2),
        ("sft", config(), {"torch": "2"}, 1),
        ("sft", config(optimizer={"learning_rate": 0.2}), {"torch": "2"}, 2),
    ]  # fmt: skip
    assert [certificate_of(tmp_path, *other) for other in others] == [None] * 4


@pytest.mark.slow
def test_a_training_that_is_killed_is_proven_to_resume(project):
    printed = project.kedro("--pipeline=sft", "--steps=3", command="rlhf prove resume")
    assert re.search(r"sft +1 of 1 equal *$", printed, re.MULTILINE)
    (file,) = (project.root / "07_workspace" / "certificates").glob("sft-*.json")
    found = json.loads(file.read_text())
    (kill,) = found["tries"]["resume"]
    assert re.match(r"killed after step [0-3]$", kill[0]) and kill[1] is None
    assert {"weights", "optimizer"} == found["digests"].keys() and found["digests"]["optimizer"]
    shown = project.kedro("--pipeline=sft", command="rlhf status")
    assert re.search(r"sft +finished .*resume: 1 of 1 equal", shown)
