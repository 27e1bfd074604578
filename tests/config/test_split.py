"""Parameter blocks in general, and those of the split."""

import pytest
from pydantic import ValidationError

from rlhf_pipeline.config.block import Block, operational
from rlhf_pipeline.config.split import (
    PHASES,
    BlendedSourceConfig,
    ColumnMap,
    SourceConfig,
    SplitConfig,
)


class Inner(Block):
    size: int = 1
    """How many."""

    port: int = operational(29500, ge=1024)
    """Where it listens."""


class Outer(Block):
    rate: float = 0.5
    workers: int = operational(2)
    one: Inner = Inner()
    several: tuple[Inner, ...] = (Inner(size=2), Inner(size=3))
    named: dict[str, Inner] = {"a": Inner(size=4)}  # noqa: RUF012 - pydantic copies it
    maybe: Inner | None = None


def test_recipe_leaves_out_operational_fields_at_every_depth():
    assert Outer(workers=7, one=Inner(port=2000)).recipe() == {
        "rate": 0.5,
        "one": {"size": 1},
        "several": [{"size": 2}, {"size": 3}],
        "named": {"a": {"size": 4}},
        "maybe": None,
    }
    assert Inner().port == 29500


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({"path": "own.jsonl"}, "files (own.jsonl)"),
        ({"path": "s3://bucket/part-?.csv"}, "files (part-?.csv)"),
        ({"path": "http://host:80/a@b.csv"}, "files (a@b.csv)"),
        ({"path": "https://host/own.csv?$QUERY"}, "files (own.csv)"),
        ({"path": "a/saved", "split": "test"}, "files (test, saved)"),
        ({"name": "stanfordnlp/SHP", "subset": "askbaking"}, "stanfordnlp/SHP (askbaking)"),
    ],
)
def test_a_label_contains_the_file_and_not_the_folder(fields, label):
    assert SourceConfig(**{"name": "files"} | fields).label() == label


def split(**changes):
    fields = {"sources": [{}], "max_prompt_tokens": 8, "max_response_tokens": 9}
    return SplitConfig(**fields | changes)


LOGIN = "set the credentials of the store in the environment"
QUERY = r"export the query as an environment variable, and write \?\$NAME"
WEIGHTS = "expected finite, non-negative numbers, at least one positive"
BOTH = r"found path \(files\) and {} \(hub\); expected only one of them"
TWICE = [{"fraction": 0.5, "phases": ["sft"]}, {"fraction": 0.7, "phases": ["ppo"]}]
KNOWN = "found {}; expected one of: chosen, prompt, rejected; "


@pytest.mark.parametrize(
    ("block", "fields", "message"),
    [
        (ColumnMap, {}, KNOWN.format("no column")),
        (ColumnMap, {"prompt": "p", "chosen": "c"}, KNOWN.format("chosen, prompt")),
        (ColumnMap, {"text": "t", "reference": "a"}, KNOWN.format("reference, text")),
        (ColumnMap, {"response": "r", "messages": "m"}, KNOWN.format("messages, response")),
        (ColumnMap, {"prompt": []}, r"prompt: found \[\], expected at least one column"),
        (ColumnMap, {"prompt": "p", "extra": ["scored"]}, "extra: found scored, expected other"),
        (SourceConfig, {"name": "lab/data", "path": "a", "revision": "x"}, BOTH.format("revision")),
        (SourceConfig, {"name": "synthetic", "columns": {"text": "body"}},
         r"source 'synthetic' has fixed columns\. Fix: remove columns"),
        (SourceConfig, {"name": "files", "tasks": {"chain_sum": {}}},
         r"source 'files' has no tasks\. Fix: remove tasks, or set name to 'reasoning_gym'"),
        (SourceConfig, {"name": "reasoning_gym", "tasks": {"chain_sum": {}}},
         r"found no tasks or samples, expected both for reasoning_gym"),
        (SourceConfig, {"name": "files", "path": "https://me:secret@host/own.csv"}, LOGIN),
        (SourceConfig, {"name": "files", "path": "s3://me:sec/ret@bucket/own.csv"}, LOGIN),
        (SourceConfig, {"name": "files", "path": "https://host/own.csv?Signature=secret"}, QUERY),
        (BlendedSourceConfig, {"phases": ["ppo", "test"]},
         r"found test beside other phases in \['ppo', 't"),
        (split, {"weights": (0, 0, 0)}, WEIGHTS),
        (split, {"weights": (1, float("nan"), 1)}, WEIGHTS),
        (split, {"validation_fraction": 0.5, "test_fraction": 0.5}, "leave no prompt to train on"),
        (split, {"sources": TWICE}, "'synthetic' is listed twice"),
    ],
)  # fmt: skip
def test_what_is_refused(block, fields, message):
    with pytest.raises(ValidationError, match=message):
        block(**fields)


def test_records_do_not_depend_on_the_blend():
    fields = {"name": "files", "path": "a.csv", "columns": {"prompt": "p"}, "samples": 7}
    source = BlendedSourceConfig(**fields, fraction=0.5, phases=("ppo",))
    assert source.reading() == SourceConfig(**fields)
    assert type(source.reading()) is SourceConfig


def test_a_test_source_serves_no_phase():
    source, plain = split(sources=[{"phases": ["test"]}, {"samples": 7}]).sources
    assert source.is_test and not plain.is_test
    assert not any(source.may_serve(phase) for phase in PHASES)


def test_sources_differ_by_file_or_split():
    """The folder of a file is not part of the recipe."""
    one, other = (SourceConfig(name="files", path=f"{folder}/x.csv") for folder in "ab")
    assert one.recipe() == other.recipe()
    files = [{"name": "files", "path": name} for name in ("a.jsonl", "b.jsonl")]
    assert split(sources=files).readings() == [SourceConfig(**source) for source in files]
    parts = [{"name": "trl-lib/tldr", "split": name} for name in ("train", "test")]
    assert len(split(sources=parts).sources) == 2
