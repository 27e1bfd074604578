import json

import datasets
import huggingface_hub
import pytest

from rlhf_pipeline.config.split import ColumnMap, SourceConfig
from rlhf_pipeline.data.records import Example, Message, Text, Unused
from rlhf_pipeline.data.sources.registry import first_rows, read, record_fault, source_origin
from rlhf_pipeline.errors import ConfigError, DataError

SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "Why?"}
ASSISTANT = {"role": "assistant", "content": "So."}
TOOL = {"role": "tool", "content": "3"}
BLANK = {"role": "assistant", "content": "\n"}
PAIR = {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}


def own(tmp_path, *rows, **settings):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(name="files", path=str(path), **settings)


def test_every_row_has_its_place_and_bad_ones_count_as_samples(tmp_path):
    given = PAIR, PAIR | {"chosen": ""}, PAIR | {"chosen": "So."}
    rows = list(read(own(tmp_path, *given), 0))
    assert list(read(own(tmp_path, *given, samples=2), 0)) == rows[:2]
    prompt = (Message("user", "Why?"),)
    assert rows == [
        ("own.jsonl:1", Example(prompt, "Because.", "No.")),
        ("own.jsonl:2", Unused("the chosen answer is empty")),
        ("own.jsonl:3", Example(prompt, "So.", "No.")),
    ]


ALTERNATION = "the prompt's turns are not user and assistant in alternation"
HALF = "half a surrogate pair, not a character"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": [USER, ASSISTANT, USER, USER]}, ALTERNATION),
        ({"prompt": [ASSISTANT, USER]}, ALTERNATION),
        ({"prompt": [USER, SYSTEM, USER]}, ALTERNATION),
        ({"prompt": [USER, TOOL, USER]}, ALTERNATION),
        ({"prompt": [TOOL, ASSISTANT, USER]}, ALTERNATION),
        ({"prompt": [SYSTEM, SYSTEM, USER]}, ALTERNATION),
        ({"prompt": " \n"}, "a turn of the prompt is empty"),
        ({"prompt": [USER, BLANK, USER]}, "a turn of the prompt is empty"),
        ({"chosen": "\u3000"}, "the chosen answer is empty"),  # an ideographic space
        ({"rejected": ""}, "the rejected answer is empty"),
        ({"chosen": " No.\n"}, "the two answers are equal"),
        ({"prompt": "half \ud83d of a pair"}, HALF),
        ({"rejected": "\udc00"}, HALF),
        ({"chosen": "a\0b"}, "a NUL character in the text"),
        ({"rejected": 7}, "column 'rejected' is int, not a string or a list of messages"),
    ],
)
def test_bad_rows(tmp_path, changes, reason):
    assert list(read(own(tmp_path, PAIR | changes), 0)) == [("own.jsonl:1", Unused(reason))]


def test_a_row_without_a_further_column_is_bad(tmp_path):
    columns = {name: name for name in PAIR} | {"extra": ["level"]}
    ((_, found),) = read(own(tmp_path, PAIR, columns=columns), 0)
    assert isinstance(found, Unused) and "column 'level' is missing" in found.reason


@pytest.mark.parametrize("roles", [(), ("system",), ("user", "assistant")])
def test_a_prompt_ends_with_the_user(roles):
    fault = record_fault(Example(tuple(Message(role, "a") for role in roles), "yes", "no"))
    assert fault == Unused("the prompt does not end with a user's turn")


@pytest.mark.parametrize(
    ("text", "record"),
    [
        ("A document.\n", Text("A document.\n")),
        (" \n\n", Unused("the text is blank", bad=False)),
        ("a\0b", Unused("a NUL character in the text")),
        ("\ud800", Unused(HALF)),
    ],
)
def test_texts(tmp_path, text, record):
    config = own(tmp_path, {"text": text}, columns=ColumnMap(text="text"))
    assert list(read(config, 0)) == [("own.jsonl:1", record)]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"name": "files"}, ConfigError, r"source 'files': path is not set\. Fix: set it"),
        ({"name": "files", "path": "none.jsonl"}, DataError, r"none\.jsonl: .*Fix: correct the"),
        ({"name": "files", "path": "own.jsonl", "split": "test"}, ConfigError,
         r"found split 'test' with path own\.jsonl, expected a folder written by"),
        ({"name": "synthetik"}, ConfigError, r"\(did you mean synthetic\?\)"),
        *(({field: "x"}, ConfigError,
           rf"source 'synthetic': found {field} 'x', expected .*none\. Fix: correct or rem")
          for field in ("path", "revision", "subset", "split")),
    ],
)  # fmt: skip
def test_a_source_without_its_origin_is_refused(tmp_path, monkeypatch, config, error, message):
    monkeypatch.chdir(tmp_path)
    own(tmp_path, {})
    with pytest.raises(error, match=message):
        source_origin(SourceConfig(**config))


def test_a_generated_source_has_no_origin_and_a_saved_data_set_a_split(tmp_path):
    assert source_origin(SourceConfig(samples=3)) == ({}, {})
    rows = datasets.Dataset.from_list([{"prompt": "a"}])
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path)
    assert source_origin(SourceConfig(name="files", path=str(tmp_path), split="test"))[0]


WEBGPT = "openai/webgpt_comparisons"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("name", "revision", "asked"),
    [
        ("Anthropic/hh-rlhf", None, [("Anthropic/hh-rlhf", None)]),
        ("Anthropic/hh-rlhf", "v2", [("Anthropic/hh-rlhf", "v2")]),
        ("Anthropic/hh-rlhf", COMMIT, []),
        (WEBGPT, None, [(WEBGPT, "refs/convert/parquet")]),
    ],
)
def test_the_hub_resolves_a_branch_to_a_commit(monkeypatch, name, revision, asked):
    questions = []

    def dataset_info(self, repository, *, revision):
        questions.append((repository, revision))
        return huggingface_hub.DatasetInfo(id=repository, sha=COMMIT)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    _, identities = source_origin(SourceConfig(name=name, revision=revision))
    assert identities == {"revision": COMMIT} and questions == asked


def test_an_unreachable_hub(monkeypatch):
    def no_route(self, *_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", no_route)
    with pytest.raises(DataError, match=r"did not return .*: no route\. Fix: .* set its `path`"):
        source_origin(SourceConfig(name="Anthropic/hh-rlhf"))


def fault_of(source, max_bad_fraction=0.0):
    with pytest.raises(DataError) as refused:
        first_rows(source, max_bad_fraction)
    return refused.value.message


def test_the_first_rows_are_read_before_a_run(tmp_path):
    good = own(tmp_path, PAIR)
    for path in (good.path, f"{tmp_path}/*.jsonl"):
        (row,) = first_rows(SourceConfig(name="files", path=path), 0.0).items()
        assert row[0] == "own.jsonl:1" and row[1].chosen == PAIR["chosen"]
    fault = fault_of(SourceConfig(name="tatsu-lab/alpaca", path=good.path))
    assert "own.jsonl:1: column 'instruction' is missing" in fault
    assert fault.endswith("Fix: correct the source's `columns` or the file: most rows are bad.")
    columns = {"prompt": "question", "chosen": "chosen", "rejected": "rejected"}
    fault = fault_of(own(tmp_path, PAIR, columns=columns))
    assert "own.jsonl:1: column 'question' is missing; the columns are 'prompt'," in fault
    latin = tmp_path / "latin.csv"
    latin.write_bytes("prompt,chosen,rejected\né,ü,ö\n".encode("latin1"))
    assert fault_of(SourceConfig(name="files", path=str(latin))).endswith(
        "latin.csv:2: not UTF-8\nFix: convert the file, for example: iconv -f latin1 -t utf-8 "
        "FILE > NEW_FILE"
    )
    fault = fault_of(own(tmp_path, {"q": "Why?", "a": "So."}))
    assert "the columns do not say which of them to read; they are 'q', 'a'. Fix: add to" in fault


def test_bad_rows_are_refused_before_a_run_if_no_other_row_can_make_up_for_them(tmp_path):
    """The first 1,000 rows are read. The others of a longer file may be good."""
    bad = PAIR | {"chosen": ""}
    source = own(tmp_path, *[bad] * 999, *[PAIR] * 10)
    assert len(first_rows(source, 0.5)) == 1
    assert "999 of 1000 rows are bad" in fault_of(source)
    assert "1000 of 1000 rows are bad" in fault_of(own(tmp_path, *[bad] * 1000, PAIR), 0.5)
    assert "2 of 3 rows are bad" in fault_of(own(tmp_path, bad, bad, PAIR), 0.5)


@pytest.mark.parametrize(
    ("row", "is_uniform"),
    [
        (PAIR, True),
        (PAIR | {"reference": "a"}, False),
        ({"prompt": "Why?", "response": "So.", "label": True}, False),
    ],
)
def test_rows_after_the_first_ones_may_have_another_form(row, is_uniform, tmp_path):
    """The column map decides whether a prompt has two answers; a true answer may be missing."""
    columns = {name: name for name in row}
    whole = first_rows(own(tmp_path, row, columns=columns), 1.0)
    assert (whole.is_whole, whole.is_uniform) == (True, True)
    found = first_rows(own(tmp_path, *[row] * 1001, columns=columns), 1.0)
    assert (found.is_whole, found.is_uniform) == (False, is_uniform)


@pytest.mark.parametrize(
    "source", [{"name": "Dahoas/rm-static"}, {"name": "files", "path": "s3://nowhere/pairs.jsonl"}]
)
def test_rows_that_are_not_here_are_left_to_their_stage(source):
    assert first_rows(SourceConfig(**source), 0.0) == {}
    assert len(first_rows(SourceConfig(name="synthetic"), 0.0)) == 8
