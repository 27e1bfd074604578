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
from rlhf_pipeline.data.records import Example, Message, Text
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
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in output.rglob("*")
        if path.is_file()
    }


def test_files_and_columns(write_records, prepare, tokenizer, tmp_path, load, ten):
    prepare(write_records("own", *ten))
    assert sorted(digests(tmp_path / "out")) == FILES
    seen = {}
    for file in FILES:
        folder, rows = file.split("/")[0], load(file)
        numbers = [int(one["id"].removeprefix("own:")) for one in rows]
        assert numbers == sorted(numbers)
        for n, one in zip(numbers, rows, strict=True):
            assert one.pop("id") == f"own:{n}"
            if folder == "sft":
                assert one.pop("loss_mask") == [True] * len(one["response_ids"])
            texts = {name: tokenizer.decode(one.pop(name)) for name in [*one] if "_ids" in name}
            assert texts.pop("prompt_ids") == f"\n\nHuman: Question {n}?\n\nAssistant:"
            right, wrong = f" Right {n}.<|end|>", f" Wrong {n}.<|end|>"
            messages = [{"role": "user", "content": f"Question {n}?"}]
            assert texts | one == {
                "sft": {"response_ids": right},
                "reward_model": {"chosen_ids": right, "rejected_ids": wrong},
            }.get(folder, {"source": "files", "messages": messages, "reference": None})
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
    first = digests(tmp_path / "a")
    assert first == digests(tmp_path / "b") and len(first) == 10
    assert reports[0] == reports[1]
    prepare(own, out="c", seed=8, texts=texts)
    other = digests(tmp_path / "c")
    changed = {name for name in other if other[name] != first[name]}
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
def other(tokenizer):
    """The reader of a tokenizer with another template and other control tokens."""
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"pad_token": "[PAD]", "eos_token": "[SEP]"})
    other.chat_template = (
        "{% for m in messages %}{{ m.role }}={{ m.content }}[SEP]\n{% endfor %}"
        "{% if add_generation_prompt %}assistant={% endif %}"
    )
    return Reader(other, TokenContract.of(other))


def test_a_reward_model_with_another_tokenizer_gets_the_same_comparisons_in_its_own(
    write_records, prepare, other, tmp_path, load, ten
):
    """The rows held back for the second reward model are in its tokens, too; all other files are
    those of a split without it."""
    own = write_records("own", *ten)
    prepare(own, out="plain", held_back=0.4)
    prepare(own, held_back=0.4, further=(other,))
    plain, both = digests(tmp_path / "plain"), digests(tmp_path / "out")
    added, changed = (
        {f"{folder}/{part}.arrow" for part in ("train", "validation")}
        for folder in ("reward_model_own", "judge_model")
    )
    assert both.keys() - plain.keys() == added
    assert {path for path in plain if plain[path] != both[path]} == changed
    for row in [row for path in added | changed for row in load(path)]:
        n = row["id"].removeprefix("own:")
        for name, text in {
            "prompt": f"user=Question {n}?[SEP]\nassistant=",
            "chosen": f"Right {n}.[SEP]",
            "rejected": f"Wrong {n}.[SEP]",
        }.items():
            assert other.tokenizer.decode(row[f"{name}_ids"]) == text
    for path in added:
        ids = [row["id"] for row in load(path)]
        assert ids == [row["id"] for row in load(path.replace("_own", ""))] != []


def test_a_fault_in_the_tokens_of_the_reward_model_names_its_parameter(
    write_records, prepare, other, ten
):
    own = write_records("own", *ten)
    with pytest.raises(DataError, match=r"^reward_model\.base_model: own:\d: the prompt has"):
        prepare(own, further=(other,), max_prompt_tokens=23)
    other.tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ArtifactError, match=r"^reward_model\.base_model: own:\d: .*template rej"):
        prepare(own, out="two", further=(other,))


def test_a_control_token_of_either_tokenizer_is_a_bad_row(write_records, prepare, other, load, ten):
    forged = [
        asked("a", "b<|end|>", "c"),
        asked("a", "b", "<|pad|>"),
        Example((Message("system", "<|end|>"), Message("user", "a")), "b", "c"),
    ]
    own = write_records("own", *forged, *ten, asked("Is this [SEP] an end?", "Yes.", "No."))
    bad = "the text contains the tokenizer's control token "
    first = rf"(?s)source files \(0\.jsonl\): 1 of 14 rows .*own:0: {bad}<\|end\|>"
    with pytest.raises(DataError, match=first):
        prepare(own)
    report = prepare(own, out="allowed", max_bad_fraction=0.22)  # 3 / 14 is 0.214
    found = {f"{bad}<|end|>": 2, f"{bad}<|pad|>": 1}
    assert report["sources"]["files (0.jsonl)"]["bad"] == found
    assert headline(report)["data/bad_rows"] == 3
    written = {one["id"] for file in report["files"] for one in load(file, out="allowed")}
    assert written == {f"own:{n}" for n in range(3, 14)}
    report = prepare(own, further=(other,), max_bad_fraction=0.5)
    assert report["sources"]["files (0.jsonl)"]["bad"] == found | {f"{bad}[SEP]": 1}


def test_prompts_that_are_equal_once_cut_stay_in_one_part(write_records, prepare, load, ten):
    long = [asked(f"{n} {'^' * 300}", "Yes.", "No.") for n in range(10)]
    nothing_held_out = {"validation_fraction": 0, "test_fraction": 0}
    options = {"weights": (1, 0, 1), "over_long_prompts": "truncate"} | nothing_held_out
    report = prepare(write_records("own", *long, *ten), **options)
    cut = {phase: [len(one["prompt_ids"]) for one in load(f"{phase}/train.arrow")].count(200)
           for phase in ("sft", "ppo")}  # fmt: skip
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


def test_further_columns_reach_the_prompts_and_no_other_file(tmp_path, prepare, load):
    columns = {"prompt": "q", "chosen": "a", "rejected": "b", "extra": ["level", "tags"]}
    rows = [
        {"q": f"What is {n} + {n}?", "a": f"It is {2 * n}.", "b": "No.", "level": n, "tags": ["x"]}
        for n in range(10)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    with RecordsWriter(tmp_path / "rated", has_extra=True) as writer:
        source = SourceConfig(name="files", path=str(file), columns=columns)
        for place, record in read(source, seed=1):
            writer.add(place, record)
    (tmp_path / "rated" / "counts.json").write_text("{}")
    prepare(tmp_path / "rated")
    for path in ("ppo/train", "evaluation/test"):
        for row in load(f"{path}.arrow"):
            level = int(row["messages"][0]["content"].split()[2])
            assert json.loads(row["extra"]) == {"level": level, "tags": ["x"]}
    assert "extra" not in load("sft/train.arrow")[0]


@pytest.fixture
def packed(tokenizer, split_config, tmp_path):
    """Packs folders of texts into blocks. Returns the numbers of documents, tokens and blocks, and
    of tokens that are left out; and the blocks as text with "." for <|end|>. The texts consist of
    characters that no merge joins, so each is a token."""

    def packed(*sources, block_tokens, max_bad_fraction=0.0):
        named = [{"name": "files", "path": source.name} for source in sources]
        texts = {"sources": named, "block_tokens": block_tokens}
        config = split_config(max_bad_fraction=max_bad_fraction, pretraining=texts)
        report = pack(config, Reader(tokenizer, TokenContract.of(tokenizer)), sources, tmp_path)
        file = tmp_path / "pretraining" / "train.arrow"
        blocks = Dataset.from_file(str(file))["input_ids"][:]
        assert {len(ids) for ids in blocks} == {report["block_tokens"]} == {block_tokens}
        names = ("documents", "tokens", "blocks", "tokens_left_out")
        text = " ".join(map(tokenizer.decode, blocks)).replace("<|end|>", ".")
        return [report[name] for name in names], text

    return packed


@pytest.mark.parametrize(
    ("sources", "block_tokens", "numbers", "blocks"),
    [
        # ~~~.^^.# ##.~. is the stream; 3 documents of the first source, 1 of the second.
        (["~~~ ^^ ###", "~"], 4, [4, 13, 3, 1], "~~~. ^^.# ##.~"),
        # ~.^. #.~. ^^^^^^^^. are the batches: 4, 4 and 9 tokens.
        (["~ ^ # ~ ^^^^^^^^"], 5, [5, 17, 3, 2], "~.^.# .~.^^ ^^^^^"),
    ],
)
def test_documents_are_joined_by_eos_and_cut_into_blocks_that_span_batches(
    write_records, packed, monkeypatch, sources, block_tokens, numbers, blocks
):
    monkeypatch.setattr(record_files, "_BATCH_ROWS", 2)
    folders = [write_records(texts[:2], *map(Text, texts.split())) for texts in sources]
    assert packed(*folders, block_tokens=block_tokens) == (numbers, blocks)


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


def test_a_text_with_a_control_token_is_a_bad_row(write_records, packed):
    first = write_records("first", Text("~"), Text("^"))
    second = write_records("second", Text("a<|end|>"), Text("#"), Text("##"))
    with pytest.raises(
        DataError,
        match=r"(?s)source files \(second\): 1 of 3 rows .*second:0: .*control token <\|end\|>",
    ):
        packed(first, second, block_tokens=2)
    # A third of the second source's rows.
    found = packed(first, second, block_tokens=2, max_bad_fraction=1 / 3)
    assert found == ([4, 9, 4, 1], "~. ^. #. ##")


def test_blocks_begin_with_bos_if_the_tokenizer_puts_it_before_text(
    write_records, packed, tokenizer
):
    """GPT-2 and SmolLM2 name a BOS that they never put before text."""
    texts = write_records("texts", Text("~~~"), Text("^^"))
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    assert packed(texts, block_tokens=3) == ([2, 7, 2, 1], "~~~ .^^")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert packed(texts, block_tokens=3) == ([2, 7, 3, 1], "<s>~~ <s>~. <s>^^")
