"""PKU-SafeRLHF: two answers to a question, compared by helpfulness (Ji et al. 2024)."""

from rlhf_pipeline.data.sources.adapter import (
    MalformedRowError,
    Source,
    field,
    preferred,
    question,
    text,
)


def parse(row):
    """`better_response_id` is the index of the preferred answer."""
    better = field(row, "better_response_id", int)
    if better not in (0, 1):
        raise MalformedRowError(f"better_response_id: found {better}, expected 0 or 1")
    answers = text(row, "response_0"), text(row, "response_1")
    return preferred(question(text(row, "prompt")), answers, (1 - better, better))


PKU = Source(
    name="PKU-Alignment/PKU-SafeRLHF",
    kind="comparisons",
    columns=("prompt", "response_0", "response_1", "better_response_id"),
    parse=parse,
)
