import copy
import json

import pytest
from datasets import Dataset

from rlhf_pipeline.config.split import PHASES, SplitConfig
from rlhf_pipeline.data import split as module
from rlhf_pipeline.data.files import read_rows
from rlhf_pipeline.data.record_files import RecordsWriter
from rlhf_pipeline.data.records import Example, Message, RowCounts, Unused
from rlhf_pipeline.data.token_contract import Reader, TokenContract


@pytest.fixture
def tokenizer(tokenizer):
    """Ids: 0 is <|pad|>, 1 is <|end|>. Each test gets a copy, which it may change."""
    return copy.deepcopy(tokenizer)


@pytest.fixture
def write_records(tmp_path):
    """Writes rows like stage `source`, with the places "name:0", "name:1" ...; returns their
    folder."""

    def write(name, *rows):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        counts = RowCounts(rows=len(rows))
        with RecordsWriter(folder) as writer:
            for number, row in enumerate(rows):
                if isinstance(row, Unused):
                    counts.add_unused(f"{folder.name}:{number}", row)
                else:
                    writer.add(f"{folder.name}:{number}", row)
        counts.write(folder)
        return folder

    return write


@pytest.fixture
def split_config():
    """Configurations with a tenth each for validation and test, or with all prompts for one phase:
    `only="sft"`."""

    def split_config(*, count=1, texts=0, only=None, **changes):
        held_out = 0.1 if only is None else 0
        values = {
            "sources": [{"name": "files", "path": f"{index}.jsonl"} for index in range(count)],
            "max_prompt_tokens": 200,
            "max_response_tokens": 200,
            "validation_fraction": held_out,
            "test_fraction": held_out,
        }
        if only is not None:
            values["weights"] = tuple(int(phase == only) for phase in PHASES)
        if texts:
            named = [{"name": "files", "path": f"texts{index}.txt"} for index in range(texts)]
            values["pretraining"] = {"sources": named, "block_tokens": 4}
        return SplitConfig(**values | changes)

    return split_config


@pytest.fixture
def prepare(tokenizer, split_config, tmp_path):
    """Splits folders of records into the folder `out`; returns the report as JSON types."""

    def prepare(*folders, out="out", seed=0, texts=(), further=(), **changes):
        report = module.split_sources(
            split_config(count=len(folders), texts=len(texts), **changes),
            [Reader(tokenizer, TokenContract.of(tokenizer)), *further],
            seed,
            sources=folders,
            pretraining=texts,
            output=tmp_path / out,
            metrics_file=tmp_path / "metrics.jsonl",
        )
        return json.loads(json.dumps(report))

    return prepare


@pytest.fixture
def load(tmp_path):
    """The rows of a prepared file: `load("sft/train.arrow")`."""
    return lambda file, out="out": list(Dataset.from_file(str(tmp_path / out / file)))


@pytest.fixture
def ten():
    """Ten distinct prompts: 1 each for test and validation; the quotas of the other 8 by 2:4:4 are
    1.6, 3.2, 3.2, so 2, 3, 3 prompts."""
    return [
        Example((Message("user", f"Question {n}?"),), f"Right {n}.", f"Wrong {n}.")
        for n in range(10)
    ]


@pytest.fixture
def write(tmp_path):
    """Writes a file into the test's folder; returns its path."""

    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return str(path)

    return write


@pytest.fixture
def read():
    """Reads all rows of a path."""
    return lambda path, columns=(), split="train": list(read_rows(str(path), columns, split))
