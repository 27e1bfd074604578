from __future__ import annotations

from rlhf_pipeline.data.source import MODULES
from rlhf_pipeline.data.sources.synthetic import GOLD_SCORES, gold_score

ASKED = [{"role": "user", "content": "Where?"}]


def test_each_gold_score_belongs_to_a_source() -> None:
    assert set(GOLD_SCORES) == {"synthetic"} <= set(MODULES)


def test_the_gold_score_of_the_synthetic_source() -> None:
    prompt = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Anna here, what is the capital of France?"},
    ]
    assert GOLD_SCORES["synthetic"](prompt, "The capital of France is Paris.") == 2
    assert GOLD_SCORES["synthetic"](prompt, "The capital of France is Rome.") == -2


def test_the_gold_score_of_a_response_depends_on_its_source(monkeypatch) -> None:
    monkeypatch.setitem(
        GOLD_SCORES,
        "exact",
        lambda prompt, response: float((prompt, response) == (ASKED, "Paris.")),
    )
    assert gold_score("exact", ASKED, " Paris.\n") == 1
    assert gold_score("exact", ASKED, "Paris") == 0
    assert gold_score("files", ASKED, "Paris.") is None
