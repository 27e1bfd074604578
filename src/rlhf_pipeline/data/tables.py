"""The prepared files: their rows and their columns.

The format is Arrow IPC streams, which `datasets.Dataset.from_file` memory-maps without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from rlhf_pipeline.config.split import Phase
from rlhf_pipeline.data.parts import Part
from rlhf_pipeline.data.record_files import MESSAGE
from rlhf_pipeline.data.tokenization import Answer

_IDS = pa.list_(pa.int32())
_PROMPT = {"id": pa.string(), "prompt_ids": _IDS}
_DEMONSTRATION = pa.schema(_PROMPT | {"response_ids": _IDS, "loss_mask": pa.list_(pa.bool_())})
_COMPARISON = pa.schema(_PROMPT | {"chosen_ids": _IDS, "rejected_ids": _IDS})
_REWARDED = pa.schema(
    _PROMPT | {"source": pa.string(), "messages": pa.list_(MESSAGE), "reference": pa.string()}
)


@dataclass(frozen=True)
class Table:
    """One prepared file."""

    path: str
    """Relative to the folder of all prepared files."""
    part: Part
    """The part whose prompts it contains."""
    phase: Phase | None
    """The file contains only rows that this phase can use; None: all rows."""
    answers: tuple[Answer, ...]
    """The answers that its rows need. Without answers, it contains each distinct prompt once."""
    schema: pa.Schema


def _of_phase(phase: Phase, answers: tuple[Answer, ...], schema: pa.Schema) -> tuple[Table, Table]:
    return (
        Table(f"{phase}/train.arrow", phase, phase, answers, schema),
        Table(f"{phase}/validation.arrow", "validation", phase, answers, schema),
    )


TABLES = (
    *_of_phase("sft", ("chosen",), _DEMONSTRATION),
    *_of_phase("reward_model", ("chosen", "rejected"), _COMPARISON),
    *_of_phase("ppo", (), _REWARDED),
    Table("evaluation/test.arrow", "test", None, (), _REWARDED),
)
PRETRAINING = "pretraining/train.arrow"
