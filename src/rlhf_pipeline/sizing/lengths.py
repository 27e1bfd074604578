"""Rows and tokens of each phase: from a published split, or as the limits allow."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.split import PHASES, SplitConfig
from rlhf_pipeline.runtime.manifest import NAME, Manifest


@dataclass(frozen=True)
class Lengths:
    """The training rows of a phase."""

    rows: int | None
    """None: not known before the split."""
    prompt: float
    """Mean tokens of a prompt."""
    response: float
    """Mean tokens of a response: of both answers together for comparisons, 0 for prompts alone."""
    longest_prompt: int
    longest_response: int
    copies: int = 1
    """Times that a row contains its prompt: 2 for comparisons."""

    @property
    def row(self) -> float:
        """Mean tokens of a row; a comparison has its prompt twice."""
        return self.copies * self.prompt + self.response

    @property
    def longest(self) -> int:
        """Tokens of the longest row, at most."""
        return self.copies * self.longest_prompt + self.longest_response

    def sampled(self, tokens: int) -> "Lengths":
        """Rows of these prompts with a response of so many tokens."""
        return replace(self, response=tokens, longest_response=tokens)


def limits(split: SplitConfig) -> dict[str, Lengths]:
    """What the limits of the split allow: every row is as long as they say."""
    prompt, response = split.max_prompt_tokens, split.max_response_tokens
    rows = {phase: expected_rows(split, index) for index, phase in enumerate(PHASES)}
    return {
        "sft": Lengths(rows["sft"], prompt, response, prompt, response),
        "reward_model": Lengths(
            rows["reward_model"], prompt, 2 * response, prompt, 2 * response, copies=2
        ),
        "ppo": Lengths(rows["ppo"], prompt, 0, prompt, 0),
    }


def expected_rows(split: SplitConfig, index: int) -> int | None:
    """Training rows of a phase, if every source has a number of samples."""
    samples = [source.samples for source in split.sources if not source.is_test]
    if None in samples:
        return None
    train = 1 - split.validation_fraction - split.test_fraction
    share = split.weights[index] / sum(split.weights)
    return int(sum(filter(None, samples)) * train * share)


def measured(folder: Path, split: SplitConfig) -> dict[str, Lengths] | None:
    """The lengths of the newest published split; None if its parameters were others.

    `folder` contains its versions.
    """
    newest = max(folder.glob(f"*/{folder.name}/{NAME}"), default=None)
    if newest is None:
        return None
    made = SplitConfig.model_validate(Manifest.read(newest.parent).config["split"])
    if made.recipe() != split.recipe():
        return None
    files = json.loads((newest.parent / "report.json").read_text())["files"]
    rows = {phase: files[f"{phase}/train.arrow"] for phase in PHASES}
    # A phase of weight 0 has no rows, and so no lengths.
    return limits(split) | {name: _of_file(file) for name, file in rows.items() if file["rows"]}


def _of_file(file: Mapping[str, Any]) -> Lengths:
    tokens, rows = file["tokens"], file["rows"]
    answers = [counts for column, counts in tokens.items() if column != "prompt_ids"]
    return Lengths(
        rows=rows,
        prompt=tokens["prompt_ids"]["total"] / rows,
        response=sum(answer["total"] for answer in answers) / rows,
        longest_prompt=tokens["prompt_ids"]["max"],
        longest_response=sum(answer["max"] for answer in answers),
        copies=max(1, len(answers)),
    )
