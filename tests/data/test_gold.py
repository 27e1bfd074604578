from __future__ import annotations

from rlhf_pipeline.data.gold import JUDGES, judged
from rlhf_pipeline.data.records import Message
from rlhf_pipeline.data.sources.lookup import MODULES

ASKED = Message("user", "Where?")


def test_each_judge_belongs_to_a_source() -> None:
    assert set(JUDGES) == {"synthetic"} <= set(MODULES)


def test_the_synthetic_judge_knows_the_gold_score() -> None:
    prompt = (Message("user", "Anna here, what is the capital of France?"),)
    assert JUDGES["synthetic"](prompt, "The capital of France is Paris.") == 2
    assert JUDGES["synthetic"](prompt, "The capital of France is Rome.") == -2


def test_a_response_is_judged_where_its_source_can(monkeypatch) -> None:
    monkeypatch.setitem(
        JUDGES, "exact", lambda prompt, response: float((prompt, response) == ((ASKED,), "Paris."))
    )
    prompt = [{"role": "user", "content": "Where?"}]
    assert judged("exact", prompt, " Paris.\n") == 1
    assert judged("exact", prompt, "Paris") == 0
    assert judged("files", prompt, "Paris.") is None
