"""Sources that know the true quality of any answer, and how they tell it."""

from __future__ import annotations

from collections.abc import Callable

from rlhf_pipeline.data.records import Message
from rlhf_pipeline.data.sources import synthetic

Judge = Callable[[tuple[Message, ...], str], float]
"""Prompt and response to the response's quality; higher is better. ValueError for a prompt of another source."""

JUDGES: dict[str, Judge] = {"synthetic": synthetic.judge}
"""Source to judge."""
