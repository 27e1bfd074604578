from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.data import split as module
from rlhf_pipeline.data.records import Example, Message, Text

FILES = [
    "evaluation/test.arrow",
    "kto/train.arrow",
    "kto/validation.arrow",
    "ppo/train.arrow",
    "ppo/validation.arrow",
    "reward_model/train.arrow",
    "reward_model/validation.arrow",
    "sft/train.arrow",
    "sft/validation.arrow",
]
Prepare = Callable[..., dict[str, Any]]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(module.__file__).parents[2])}


def asked(prompt: str, *answers: str) -> Example:
    return Example((Message("user", prompt),), *answers)


def digests(output: Path) -> dict[str, str]:
    files = sorted(path for path in output.rglob("*") if path.is_file())
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def test_files_and_columns(
    write_records, prepare: Prepare, tokenizer, tmp_path: Path, load, ten
) -> None:
    prepare(write_records("own", *ten))
    assert sorted(digests(tmp_path / "out")) == FILES
    seen = {}
    for file in FILES:
        rows = load(file)
        numbers = [int(one["id"].removeprefix("own:")) for one in rows]
        assert numbers == sorted(numbers)
        for n, one in zip(numbers, rows, strict=True):
            found = {
                name: tokenizer.decode(value) if name.endswith("_ids") else value
                for name, value in one.items()
            }
            prompt = {"id": f"own:{n}", "prompt_ids": f"\n\nHuman: Question {n}?\n\nAssistant:"}
            right, wrong = f" Right {n}.<|end|>", f" Wrong {n}.<|end|>"
            messages = [{"role": "user", "content": f"Question {n}?"}]
            if "loss_mask" in one:
                assert found.pop("loss_mask") == [True] * len(one["response_ids"])
            assert found == prompt | {
                "sft": {"response_ids": right},
                "reward_model": {"chosen_ids": right, "rejected_ids": wrong},
            }.get(
                file.split("/")[0], {"source": "files", "messages": messages, "reference": None}
            )  # fmt: skip
        seen[file] = set(numbers)
    phases = ("sft", "reward_model", "ppo")
    validation = [seen.pop(f"{phase}/validation.arrow") for phase in phases]
    assert validation[0] == validation[1] == validation[2]
    assert seen.pop("kto/train.arrow") == seen.pop("kto/validation.arrow") == set()
    assert list(map(len, seen.values())) == [1, 3, 3, 2] and len(validation[0]) == 1
    assert set.union(validation[0], *seen.values()) == set(range(10))


def test_rows_keep_the_order_of_the_sources_over_batches(
    write_records, prepare: Prepare, load
) -> None:
    # 2,300 rows are three batches of at most 1,000. Rows from the 1,100th on repeat earlier
    # prompts.
    first = write_records("first", *(asked(f"Question {n % 1100}?") for n in range(2300)))
    second = write_records("second", asked("Question 3?"), asked("One more?"))
    prepare(first, second, only="ppo")
    ids = [one["id"] for one in load("ppo/train.arrow")]
    assert ids == [*(f"first:{n}" for n in range(1100)), "second:1"]


def test_identical_input_gives_identical_bytes(
    write_records, prepare: Prepare, tmp_path: Path
) -> None:
    rows = [asked(f"Question {n}?", "Yes." * (n % 7 + 1), "No.") for n in range(1500)]
    own = write_records("own", *rows)
    texts = (write_records("texts", *(Text("A document.") for _ in range(50))),)
    reports = [prepare(own, out=name, seed=7, texts=texts) for name in "ab"]
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert len(digests(tmp_path / "a")) == 10
    assert reports[0] == reports[1]
    prepare(own, out="c", seed=8, texts=texts)
    changed = {
        name
        for name, digest in digests(tmp_path / "c").items()
        if digests(tmp_path / "a")[name] != digest
    }
    assert changed == {name for name in FILES if not name.startswith("kto/")}  # no labels


@pytest.mark.parametrize(
    ("imported", "kedro"),
    [
        ("rlhf_pipeline.data.split", {"kedro"}),
        ("rlhf_pipeline.data.split_report", {"kedro", "numpy", "pyarrow"}),
        ("rlhf_pipeline.pipelines.preparation", {"rlhf_pipeline.data.blend", "pyarrow"}),
    ],
)
def test_starting_imports_nothing_heavy(imported: str, kedro: set[str]) -> None:
    program = (
        f"import sys, {imported}\n"
        "heavy = {'datasets', 'deepspeed', 'matplotlib', 'mlflow', 'torch', 'transformers'}\n"
        f"heavy |= {kedro}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=ENVIRONMENT)
