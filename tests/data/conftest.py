from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_pipeline.config.split import PHASES, SplitConfig
from rlhf_pipeline.data import split as module
from rlhf_pipeline.data.files import read_rows
from rlhf_pipeline.data.record_files import RecordsWriter
from rlhf_pipeline.data.records import Example, Message, Record, RowCounts, Unused
from rlhf_pipeline.data.template import HUMAN_ASSISTANT_TEMPLATE
from rlhf_pipeline.data.token_contract import Reader, TokenContract

SENTENCES = (
    "\n\nHuman: What colour is the sky on a clear day?\n\nAssistant: On a clear day the sky is "
    "blue.",
    "\n\nHuman: Where do penguins live?\n\nAssistant: They live on the coasts of the southern "
    "half of the world.",
    "\n\nHuman: Could you name a river in Africa?\n\nAssistant: The Nile, which ends in the "
    "Mediterranean Sea.",
    "\n\nHuman: How many days has a week?\n\nAssistant: A week has seven days, and two of them "
    "are the weekend.",
    "\n\nHuman: Who wrote the play about the prince of Denmark?\n\nAssistant: William "
    "Shakespeare wrote it.",
)


@pytest.fixture(scope="session")
def trained() -> Tokenizer:
    """A byte-level BPE of 400 tokens, 256 of them bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|pad|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


@pytest.fixture
def tokenizer(trained: Tokenizer) -> PreTrainedTokenizerFast:
    """Ids: 0 is <|pad|>, 1 is <|end|>. Each test gets a new tokenizer, which it may change."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained, pad_token="<|pad|>", eos_token="<|end|>"
    )
    tokenizer.chat_template = HUMAN_ASSISTANT_TEMPLATE
    return tokenizer


@pytest.fixture
def write_records(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows like stage `source`, with the places "name:0", "name:1" ...; returns their
    folder."""

    def write(name: str, *rows: Record | Unused) -> Path:
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
def split_config() -> Callable[..., SplitConfig]:
    """Configurations with a tenth each for validation and test, or with all prompts for one phase:
    `only="sft"`."""

    def split_config(
        *, count: int = 1, texts: int = 0, only: str | None = None, **changes: Any
    ) -> SplitConfig:
        held_out = 0.1 if only is None else 0
        values: dict[str, Any] = {
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
def prepare(tokenizer, split_config, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Splits folders of records into the folder `out`; returns the report as JSON types."""

    def prepare(
        *folders: Path,
        out: str = "out",
        seed: int = 0,
        texts: tuple[Path, ...] = (),
        further: tuple[Reader, ...] = (),
        **changes: Any,
    ) -> dict[str, Any]:
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
def load(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """The rows of a prepared file: `load("sft/train.arrow")`."""
    return lambda file, out="out": list(Dataset.from_file(str(tmp_path / out / file)))


@pytest.fixture
def ten() -> list[Example]:
    """Ten distinct prompts: 1 each for test and validation; the quotas of the other 8 by 2:4:4 are
    1.6, 3.2, 3.2, so 2, 3, 3 prompts."""
    return [
        Example((Message("user", f"Question {n}?"),), f"Right {n}.", f"Wrong {n}.")
        for n in range(10)
    ]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes], str]:
    """Writes a file into the test's folder; returns its path."""

    def write(name: str, content: bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return str(path)

    return write


@pytest.fixture
def read() -> Callable[..., list[tuple[str, Any]]]:
    """Reads all rows of a path."""
    return lambda path, columns=(), split="train": list(read_rows(str(path), columns, split))
