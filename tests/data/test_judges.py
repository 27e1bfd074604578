from __future__ import annotations

from rlhf_pipeline.data.judges import JUDGES, judged
from rlhf_pipeline.data.records import Message
from rlhf_pipeline.data.sources.registry import MODULES


def test_each_judge_belongs_to_a_source() -> None:
    assert set(JUDGES) == {"synthetic"} <= set(MODULES)


def test_the_synthetic_judge_knows_the_gold_score() -> None:
    prompt = (Message("user", "Anna here, what is the capital of France?"),)
    assert JUDGES["synthetic"](prompt, "The capital of France is Paris.") == 2
    assert JUDGES["synthetic"](prompt, "The capital of France is Rome.") == -2


def test_a_response_is_judged_where_its_source_can() -> None:
    prompt = [{"role": "user", "content": "Anna here, what is the capital of France?"}]
    assert judged("synthetic", prompt, " The capital of France is Paris.\n") == 2
    assert judged("files", prompt, "The capital of France is Paris.") is None
