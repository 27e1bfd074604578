"""One example of each phase exactly as the model sees it, and the tokens that it learns."""

from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlhf_pipeline.data.token_contract import Tokenizer

Segment = tuple[str, bool]
"""Text, and whether the model learns its tokens."""


def first_examples(folder: Path, tokenizer: Tokenizer) -> dict[str, list[Segment]]:
    """The first row of each training file as segments of text, by what it shows.

    Special tokens are written out. `folder` contains the files of `phase_files.TABLES`.
    """

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    examples: dict[str, list[Segment]] = {}
    if row := _first_row(folder / "sft" / "train.arrow"):
        tokens = zip(
            row["prompt_ids"] + row["response_ids"],
            [False] * len(row["prompt_ids"]) + row["loss_mask"],
            strict=True,
        )
        examples["SFT"] = [
            (text([token for token, _ in group]), learned)
            for learned, group in groupby(tokens, key=lambda pair: pair[1])
        ]
    if row := _first_row(folder / "reward_model" / "train.arrow"):
        prompt = text(row["prompt_ids"])
        for answer in ("chosen", "rejected"):
            examples[f"reward model, {answer} answer"] = [
                (prompt, False),
                (text(row[f"{answer}_ids"]), True),
            ]
    if row := _first_row(folder / "ppo" / "train.arrow"):
        examples["PPO, prompt"] = [(text(row["prompt_ids"]), False)]
    return examples


def _first_row(path: Path) -> dict[str, Any] | None:
    with pa.ipc.open_stream(path) as stream:
        for batch in stream:
            if len(batch):
                return dict(batch.slice(0, 1).to_pylist()[0])
    return None
