"""The prepared files: rows, tokens, labels, further columns, blocks of text; what is dropped."""

import copy
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.data import record_files
from rlhf_pipeline.data import split as module
from rlhf_pipeline.data.record_files import RecordsWriter, examples
from rlhf_pipeline.data.records import Example, Message, Text, Unused
from rlhf_pipeline.data.sources.registry import read
from rlhf_pipeline.data.split import pack
from rlhf_pipeline.data.split_report import headline
from rlhf_pipeline.data.token_contract import Reader, TokenContract
from rlhf_pipeline.errors import ArtifactError, DataError

FOLDERS = ("kto", "ppo", "reward_model", "sft")
FILES = ["evaluation/test.arrow"]
FILES += [f"{folder}/{part}.arrow" for folder in FOLDERS for part in ("train", "validation")]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(module.__file__).parents[2])}


def asked(prompt, *answers):
    return Example((Message("user", prompt),), *answers)


def digests(output):
    files = sorted(path for path in output.rglob("*") if path.is_file())
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def test_files_and_columns(write_records, prepare, tokenizer, tmp_path, load, ten):
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


def test_rows_keep_the_order_of_the_sources_over_batches(write_records, prepare, load):
    # 2,300 rows are three batches of at most 1,000. Rows from the 1,100th on repeat earlier
    # prompts.
    first = write_records("first", *(asked(f"Question {n % 1100}?") for n in range(2300)))
    second = write_records("second", asked("Question 3?"), asked("One more?"))
    prepare(first, second, only="ppo")
    ids = [one["id"] for one in load("ppo/train.arrow")]
    assert ids == [*(f"first:{n}" for n in range(1100)), "second:1"]


def test_identical_input_gives_identical_bytes(write_records, prepare, tmp_path):
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
    "imports",
    [
        {"data.split_report": "kedro numpy pyarrow", "data.split": "kedro"},
        {"pipelines.preparation": "rlhf_pipeline.data.blend pyarrow"},
    ],
)
def test_starting_imports_nothing_heavy(imports):
    heavy = "datasets deepspeed matplotlib mlflow torch transformers"
    program = ["import sys"]
    for name, more in imports.items():
        program += [f"import rlhf_pipeline.{name}"]
        program += [f"assert not {{*{f'{heavy} {more}'.split()}}} & {{*sys.modules}}, '{name}'"]
    subprocess.run([sys.executable, "-c", "\n".join(program)], check=True, env=ENVIRONMENT)


@pytest.fixture
def other_tokenizer(tokenizer):
    """One with another template and other control tokens."""
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"pad_token": "[PAD]", "eos_token": "[SEP]"})
    other.chat_template = (
        "{% for m in messages %}{{ m.role }}={{ m.content }}[SEP]\n{% endfor %}"
        "{% if add_generation_prompt %}assistant={% endif %}"
    )
    return other


def test_a_reward_model_with_another_tokenizer_gets_the_same_comparisons_in_its_own(
    write_records, prepare, tokenizer, other_tokenizer, tmp_path, load, ten
):
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
    write_records, prepare, other_tokenizer, ten
):
    forged = Example((Message("user", "Is this [SEP] an end?"),), "Yes.", "No.")
    own = write_records("own", *ten, forged)
    reader = Reader(other_tokenizer, TokenContract.of(other_tokenizer))
    assert prepare(own, out="plain")["sources"]["files (0.jsonl)"]["bad"] == {}
    report = prepare(own, further=(reader,), max_bad_fraction=0.5)
    reason = "the text contains the tokenizer's control token [SEP]"
    assert report["sources"]["files (0.jsonl)"]["bad"] == {reason: 1}


def test_a_fault_in_the_tokens_of_the_reward_model_names_its_parameter(
    write_records, prepare, other_tokenizer, ten
):
    own, contract = write_records("own", *ten), TokenContract.of(other_tokenizer)
    with pytest.raises(DataError, match=r"^reward_model\.base_model: own:\d: the prompt has"):
        prepare(own, further=(Reader(other_tokenizer, contract),), max_prompt_tokens=23)
    other_tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ArtifactError, match=r"^reward_model\.base_model: own:\d: .*template rej"):
        prepare(own, out="two", further=(Reader(other_tokenizer, contract),))


@pytest.mark.parametrize(
    "forged",
    [
        asked("a", "b<|end|>", "c"),
        asked("a", "b", "<|pad|>"),
        Example((Message("system", "<|end|>"), Message("user", "a")), "b", "c"),
    ],
)
def test_a_control_token_in_the_data_is_a_bad_row(write_records, prepare, forged, load, ten):
    own = write_records("own", forged, *ten)
    with pytest.raises(
        DataError,
        match=r"(?s)source files \(0\.jsonl\): 1 of 11 rows .*own:0: .* control token "
        r"<\|(end|pad)\|>",
    ):
        prepare(own)
    report = prepare(own, out="allowed", max_bad_fraction=0.1)  # 1 / 11 is 0.091
    (bad,) = report["sources"]["files (0.jsonl)"]["bad"].values()
    assert bad == 1
    assert headline(report)["data/bad_rows"] == 1
    written = {one["id"] for file in report["files"] for one in load(file, out="allowed")}
    assert written == {f"own:{n}" for n in range(1, 11)}


def test_prompts_that_are_equal_once_cut_stay_in_one_part(write_records, prepare, load, ten):
    long = [asked(f"{n} {'^' * 300}", "Yes.", "No.") for n in range(10)]
    report = prepare(
        write_records("own", *long, *ten),
        weights=(1, 0, 1),
        validation_fraction=0,
        test_fraction=0,
        over_long_prompts="truncate",
    )
    cut = {
        phase: sum(len(one["prompt_ids"]) == 200 for one in load(f"{phase}/train.arrow"))
        for phase in ("sft", "ppo")
    }
    (phase, kept), (other, none) = sorted(cut.items(), key=lambda item: -item[1])
    assert kept > 0 and none == 0
    assert report["files"][f"{other}/train.arrow"]["dropped"] == {
        f"prompt that, once cut, equals one of {phase}": 10 - kept
    }


def test_unused_answers_are_not_checked(write_records, prepare):
    own = write_records("own", asked("Why?", "~" * 300, "^" * 400))
    report = prepare(own, only="ppo")
    assert report["files"]["ppo/train.arrow"]["rows"] == 1
    assert report["lengths"]["response"]["texts"] == 0
    with pytest.raises(DataError, match="the chosen answer has 302"):
        prepare(own, out="sft", only="sft")
    sft = prepare(own, out="longer", only="sft", max_response_tokens=302)
    assert (sft["lengths"]["response"]["texts"], sft["lengths"]["response"]["max"]) == (1, 302)


def test_a_phase_without_a_row_to_validate_on_is_refused(write_records, prepare):
    """The quotas of two comparisons are 0.4 for validation, 0.8 for SFT and 0.8 for the reward
    model, so 0, 1 and 1."""
    comparisons = [asked(f"Compared {n}?", "Yes.", "No.") for n in range(2)]
    few = write_records("few", *comparisons, *(asked(f"Shown {n}?", "So.") for n in range(10)))
    with pytest.raises(
        DataError, match=r"^reward_model/validation\.arrow: found 0 rows, .* Fix: add data, raise"
    ):
        prepare(few, weights=(1, 1, 0), validation_fraction=0.2, test_fraction=0)


@pytest.mark.parametrize(
    ("prompts", "held_out", "empty"),
    [
        (0, 0, "sft/train.arrow, reward_model/train.arrow, ppo/train.arrow"),
        (1, 0, "sft/train.arrow, ppo/train.arrow"),  # quotas 0.2, 0.4 and 0.4
        (2, 0, "sft/train.arrow"),
        (4, 0.02, "evaluation/test.arrow, sft/validation.arrow, reward_model/validation.arrow, "
         "ppo/validation.arrow"),
    ],
)  # fmt: skip
def test_a_file_that_gets_no_prompt_is_refused_before_texts_are_read(
    write_records, prepare, prompts, held_out, empty
):
    given = write_records("few", *(asked(f"{n}?", "~" * 300, "No.") for n in range(prompts)))
    with pytest.raises(DataError, match=f"^{empty}: found 0 rows, expected at least 1. Fix: add"):
        prepare(given, weights=(2, 4, 4), validation_fraction=held_out, test_fraction=held_out)


def labelled(n, label, prompt="Is it"):
    return Example((Message("user", f"{prompt} {n}?"),), f"It is {n}.", label=label)


def test_only_labelled_examples_make_their_file(write_records, ten):
    """A demonstration and a labelled answer with the same texts have different keys."""
    plain = write_records("plain", *ten)
    assert sorted(path.name for path in plain.glob("*.arrow")) == ["examples.arrow", "texts.arrow"]
    assert "label" not in examples(plain).column_names
    answer = labelled(1, True)
    mixed = examples(write_records("mixed", answer, Example(answer.prompt, answer.chosen)))
    assert mixed.column("id").to_pylist() == ["mixed:1", "mixed:0"]
    assert mixed.column("label").to_pylist() == [None, True]
    assert len({*mixed.column("example_key").to_pylist()}) == 2


def test_labelled_answers_serve_kto_alone(write_records, prepare, load, ten, tokenizer):
    """A good answer is no demonstration, and a labelled prompt is in one part."""
    thumbs = write_records("thumbs", *(labelled(n, n % 2 == 0) for n in range(10)))
    prepare(write_records("pairs", *ten), thumbs)
    for path in ("sft/train.arrow", "ppo/train.arrow", "reward_model/train.arrow"):
        assert load(path) and not any(row["id"].startswith("thumbs") for row in load(path))
    own = load("kto/train.arrow")
    assert len(own) == 8  # two prompts are held out
    for row in own:
        number = int(row["id"].partition(":")[2])
        assert row["label"] == (number % 2 == 0)
        assert tokenizer.decode(row["response_ids"]) == f" It is {number}.<|end|>"


def test_several_sources_may_have_labels(write_records, prepare, load, ten):
    """A judgement that repeats one of an earlier source is merged; the opposite one stays."""
    first = write_records("first", labelled(1, True), *ten[:2])
    second = write_records("second", labelled(1, True), labelled(1, False))
    prepare(first, second, only="reward_model", near_duplicates="keep")
    own = [(row["id"], row["label"]) for row in load("kto/train.arrow")]
    assert [one for one in own if one[0] in ("first:0", "second:0", "second:1")] == [
        ("first:0", True), ("second:1", False),
    ]  # fmt: skip


COLUMNS = {"prompt": "q", "chosen": "a", "rejected": "b", "extra": ["level", "tags"]}


def write_rows(file):
    rows = [
        {"q": f"What is {n} + {n}?", "a": f"It is {2 * n}.", "b": "No.", "level": n, "tags": ["x"]}
        for n in range(10)
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return SourceConfig.model_validate({"name": "files", "path": str(file), "columns": COLUMNS})


def test_the_columns_reach_the_prompts_and_no_other_file(tmp_path, prepare, load):
    with RecordsWriter(tmp_path / "rated", has_extra=True) as writer:
        for place, record in read(write_rows(tmp_path / "rows.jsonl"), seed=1):
            writer.add(place, record)
    (tmp_path / "rated" / "counts.json").write_text("{}")
    prepare(tmp_path / "rated")
    for path in ("ppo/train", "evaluation/test"):
        for row in load(f"{path}.arrow"):
            level = int(row["messages"][0]["content"].split()[2])
            assert json.loads(row["extra"]) == {"level": level, "tags": ["x"]}
    assert "extra" not in load("sft/train.arrow")[0]


def test_a_row_without_the_column_and_a_value_that_json_does_not_know_are_bad(tmp_path):
    config = write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "x", "a": "y", "b": "z", "tags": 1}))
    ((_, missing),) = read(config, seed=1)
    assert isinstance(missing, Unused) and "column 'level' is missing" in missing.reason


END = 1
"""Id of <|end|>."""


@pytest.fixture
def packed(tokenizer, split_config, tmp_path):
    """Packs folders of texts into blocks."""

    def packed(*sources, block_tokens, max_bad_fraction=0.0):
        named = [{"name": "files", "path": source.name} for source in sources]
        texts = {"sources": named, "block_tokens": block_tokens}
        config = split_config(max_bad_fraction=max_bad_fraction, pretraining=texts)
        reader = Reader(tokenizer, TokenContract.of(tokenizer))
        report = pack(config, reader, sources, tmp_path)
        del report["sources"]
        return report

    return packed


def counts(*numbers):
    names = ("documents", "tokens", "block_tokens", "blocks", "tokens_left_out")
    return dict(zip(names, numbers, strict=True))


def blocks(folder):
    return Dataset.from_file(str(folder / "pretraining" / "train.arrow"))["input_ids"][:]


def ids(tokenizer, symbols):
    """The ids of single characters that no merge joins; "." stands for <|end|>."""
    return [END if symbol == "." else tokenizer.convert_tokens_to_ids(symbol) for symbol in symbols]


def test_documents_are_joined_by_eos_and_cut_into_blocks(
    write_records, packed, tokenizer, tmp_path
):
    # ~~~.^^.# ##.~. is the stream; 3 documents of the first source, 1 of the second.
    first = write_records("first", Text("~~~"), Text("^^"), Text("###"))
    second = write_records("second", Text("~"))
    assert packed(first, second, block_tokens=4) == counts(4, 13, 4, 3, 1)
    assert blocks(tmp_path) == [ids(tokenizer, each) for each in ("~~~.", "^^.#", "##.~")]


def test_blocks_span_batches(write_records, packed, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "_BATCH_ROWS", 2)
    texts = write_records("texts", Text("~"), Text("^"), Text("#"), Text("~"), Text("^^^^^^^^"))
    # ~.^. #.~. ^^^^^^^^. are the batches: 4, 4 and 9 tokens.
    assert packed(texts, block_tokens=5) == counts(5, 17, 5, 3, 2)
    assert blocks(tmp_path) == [ids(tokenizer, each) for each in ("~.^.#", ".~.^^", "^^^^^")]


def test_less_text_than_a_block_is_an_error(write_records, packed):
    texts = write_records("texts", Text("~~~"), Text("^^"))
    with pytest.raises(DataError) as error:
        packed(texts, block_tokens=8)
    assert str(error.value) == (
        "split.pretraining: found 7 tokens in 2 texts, expected at least block_tokens=8. "
        "Fix: add text, or lower split.pretraining.block_tokens."
    )
    with pytest.raises(DataError, match="found 0 tokens in 0 texts"):
        packed(write_records("empty"), block_tokens=2)


def test_a_text_with_a_control_token_is_a_bad_row(write_records, packed, tokenizer, tmp_path):
    first = write_records("first", Text("~"), Text("^"))
    second = write_records("second", Text("a<|end|>"), Text("#"), Text("##"))
    with pytest.raises(
        DataError,
        match=r"(?s)source files \(second\): 1 of 3 rows .*second:0: .*control token <\|end\|>",
    ):
        packed(first, second, block_tokens=2)
    # A third of the second source's rows.
    found = packed(first, second, block_tokens=2, max_bad_fraction=1 / 3)
    assert found == counts(4, 9, 2, 4, 1)
    assert blocks(tmp_path) == [ids(tokenizer, pair) for pair in ("~.", "^.", "#.", "##")]


@pytest.mark.parametrize("begins_text", [True, False])
def test_blocks_begin_with_bos_if_the_tokenizer_puts_it_before_text(
    write_records, packed, tokenizer, tmp_path, begins_text
):
    """GPT-2 and SmolLM2 name a BOS that they never put before text."""
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    if begins_text:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bos)]
        )
    found = packed(write_records("texts", Text("~~~"), Text("^^")), block_tokens=3)
    if begins_text:
        expected = [[bos, *ids(tokenizer, pair)] for pair in ("~~", "~.", "^^")]
    else:
        expected = [ids(tokenizer, three) for three in ("~~~", ".^^")]
    assert blocks(tmp_path) == expected
    assert found == counts(2, 7, 3, len(expected), 1)
