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
from rlhf_pipeline.data.token_contract import Reader, TokenContract
from rlhf_pipeline.errors import ArtifactError, DataError

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


@pytest.fixture
def other_tokenizer():
    """One of bytes alone, with another template and other control tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["[PAD]", "[SEP]", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["[PAD]", "[SEP]"])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", eos_token="[SEP]")
    made.chat_template = (
        "{% for m in messages %}{{ m.role }}={{ m.content }}[SEP]\n{% endfor %}"
        "{% if add_generation_prompt %}assistant={% endif %}"
    )
    return made


def test_a_reward_model_with_another_tokenizer_gets_the_same_comparisons_in_its_own(
    write_records, prepare: Prepare, tokenizer, other_tokenizer, tmp_path: Path, load, ten
) -> None:
    """The rows held back for the second reward model are in its tokens, too; all other files are
    those of a split without it."""
    reader = Reader(other_tokenizer, TokenContract.of(other_tokenizer))
    own = write_records("own", *ten)
    prepare(own, out="plain", held_back=0.4)
    prepare(own, held_back=0.4, further=(reader,))
    plain, both = digests(tmp_path / "plain"), digests(tmp_path / "out")
    in_its_tokens = {path for path in both if path.startswith(("judge_model", "reward_model_own"))}
    assert both.keys() - plain.keys() == {
        "reward_model_own/train.arrow", "reward_model_own/validation.arrow"
    }  # fmt: skip
    assert {path for path in plain if plain[path] != both[path]} == {
        "judge_model/train.arrow", "judge_model/validation.arrow"
    }  # fmt: skip
    for path in in_its_tokens:
        for row in load(path):
            n = row["id"].removeprefix("own:")
            texts = {name: other_tokenizer.decode(row[f"{name}_ids"]) for name in
                     ("prompt", "chosen", "rejected")}  # fmt: skip
            assert texts == {
                "prompt": f"user=Question {n}?[SEP]\nassistant=",
                "chosen": f"Right {n}.[SEP]",
                "rejected": f"Wrong {n}.[SEP]",
            }
    for part in ("train", "validation"):
        ids = [[row["id"] for row in load(f"{folder}/{part}.arrow")]
               for folder in ("reward_model", "reward_model_own")]  # fmt: skip
        assert ids[0] == ids[1] != []


def test_control_tokens_of_either_tokenizer_are_bad_rows(
    write_records, prepare: Prepare, other_tokenizer, ten
) -> None:
    forged = Example((Message("user", "Is this [SEP] an end?"),), "Yes.", "No.")
    own = write_records("own", *ten, forged)
    reader = Reader(other_tokenizer, TokenContract.of(other_tokenizer))
    assert prepare(own, out="plain")["sources"]["files (0.jsonl)"]["bad"] == {}
    report = prepare(own, further=(reader,), max_bad_fraction=0.5)
    reason = "the text contains the tokenizer's control token [SEP]"
    assert report["sources"]["files (0.jsonl)"]["bad"] == {reason: 1}


def test_a_fault_in_the_tokens_of_the_reward_model_names_its_parameter(
    write_records, prepare: Prepare, other_tokenizer, ten
) -> None:
    own, contract = write_records("own", *ten), TokenContract.of(other_tokenizer)
    with pytest.raises(DataError, match=r"^reward_model\.base_model: own:\d: the prompt has"):
        prepare(own, further=(Reader(other_tokenizer, contract),), max_prompt_tokens=20)
    other_tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ArtifactError, match=r"^reward_model\.base_model: own:\d: .*template rej"):
        prepare(own, out="two", further=(Reader(other_tokenizer, contract),))
