"""True answers: at most one for each prompt, and one for each prompt where a run reads them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_pipeline.config.reward_files import reads_references
from rlhf_pipeline.config.rewards import Judge, Reward
from rlhf_pipeline.data.parts import first_rows
from rlhf_pipeline.errors import DataError


def true_answers(
    rows: pa.Table, prompt_keys: np.ndarray, allowed: np.ndarray
) -> pa.DictionaryArray:
    """The true answer of the prompt of each of N examples, null if none of its rows has one.

    `prompt_keys` are (N, 16) uint8; only `allowed` rows, (N,) bool, are read. Raises DataError if
    rows of one prompt have different true answers.
    """
    encoded = rows.column("reference").combine_chunks().dictionary_encode()
    own = np.where(allowed, encoded.indices.fill_null(-1).to_numpy(), -1)
    order = np.argsort(own < 0, kind="stable")  # the rows with an answer first
    answers = np.empty_like(own)
    answers[order] = own[order][first_rows(prompt_keys[order])]
    different = np.flatnonzero((own >= 0) & (own != answers))
    if len(different):
        (row,) = rows.slice(int(different[0]), 1).to_pylist()
        raise DataError(
            f"split: found {len(np.unique(first_rows(prompt_keys[different])))} prompts with "
            "different true answers, expected one each. For example, "
            f"{row['prompt'][-1]['content'][:200]!r} has {row['reference']!r} ({row['id']}) and "
            f"{encoded.dictionary[answers[different[0]]].as_py()!r}. Fix: correct the answers, or "
            "remove columns.reference of one source"
        )
    indices = pa.array(answers, mask=answers < 0)
    return pa.DictionaryArray.from_arrays(indices, encoded.dictionary)


def require_true_answers(split: Path, rewards: Sequence[Reward], judges: Sequence[Judge]) -> None:
    """Raise DataError if prompts lack the true answers that rewards or judges read.

    `split` is the folder of the prepared files, whose report has the counts by source.
    """
    given: dict[str, Sequence[Any]] = {"ppo": rewards, "evaluation": judges}
    readers = {name: [one.label for one in g if reads_references(one)] for name, g in given.items()}
    missing = json.loads((split / "report.json").read_text()).get("without_reference")
    if missing is None and any(readers.values()):
        raise DataError(
            "split: found one of an earlier version, expected one that counts true answers. Fix: "
            "`kedro run --from-nodes=split`"
        )
    for path, counts in (missing or {}).items():
        if names := readers[path.partition("/")[0]]:
            listed = ", ".join(f"{source} {count}" for source, count in counts.items())
            raise DataError(
                f"split: found prompts without a true answer in {path} ({listed}), expected one "
                f"for each, as {', '.join(names)} reads it. Fix: set split.without_reference to "
                "drop, which keeps such prompts out of PPO and the final evaluation, or set "
                "columns.reference of the source"
            )
