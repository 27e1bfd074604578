"""Tasks of reasoning-gym as a source."""

import sys

import pytest

from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.data.records import Example, Message
from rlhf_pipeline.data.sources.generated_tasks import generate
from rlhf_pipeline.data.sources.registry import first_rows
from rlhf_pipeline.errors import ConfigError, DataError
from rlhf_pipeline.pipelines.preparation import source_job

SPELL = "Spell this word backward (example: sun -> nus):"
SHORT = {"min_word_len": 3, "max_word_len": 4}


def source(samples=6, **tasks):
    return SourceConfig(name="reasoning_gym", samples=samples, tasks=tasks)


@pytest.fixture(autouse=True)
def library():
    pytest.importorskip("reasoning_gym", reason="the extra `gym` is not installed")


def test_the_tasks_take_turns_and_each_question_has_its_answer():
    sums = {"max_terms": 2, "max_digits": 1}
    rows = dict(generate(source(spell_backward=SHORT, chain_sum=sums), seed=0))
    assert [*rows] == [f"reasoning_gym:{n}" for n in range(6)]
    assert rows["reasoning_gym:0"] == Example((Message("user", f"{SPELL} daub"),), reference="buad")
    for n, row in enumerate(rows.values()):
        asked = row.prompt[0].content
        assert asked.startswith("State the final answer to" if n % 2 else SPELL)
        last = asked.removesuffix(" =").rpartition(": ")[2]
        assert row.reference == (str(eval(last)) if n % 2 else last[::-1])


def test_the_seed_decides_everything_and_no_question_repeats():
    words = source(1000, spell_backward={"min_word_len": 3, "max_word_len": 3})
    rows = [row for _, row in generate(words, seed=0)]
    assert len({row.prompt[0].content.casefold() for row in rows}) == 1000
    assert [row for _, row in generate(words, seed=0)] == rows
    assert [row for _, row in generate(words, seed=1)][:999] != rows[1:]


@pytest.mark.parametrize(
    ("task", "given", "reason"),
    [
        ("spel_backward", {}, r"tasks\.spel_backward: unknown task \(did you mean spell_backw"),
        ("spell_backward", {"min_word": 3},
         r"tasks\.spell_backward\.min_word: unknown parameter \(did you mean min_word_len\?\)"),
        ("spell_backward", {"seed": 3}, r"tasks\.spell_backward\.seed: unknown parameter; the "
         r"parameters there are data_file, max_word_len, min_word_len"),
        ("spell_backward", {"min_word_len": 5, "max_word_len": 4},
         r"tasks\.spell_backward: reasoning_gym refuses .* max_word_len must be >= min_word_len\. "
         r"Fix: correct its parameters"),
        ("graph_color", {}, r"tasks\.graph_color: found a question with several right answers"),
    ],
)  # fmt: skip
def test_what_the_library_does_not_know_is_refused_before_the_run(task, given, reason):
    wrong = source(**{task: given})
    with pytest.raises(DataError, match=reason):
        list(generate(wrong, seed=0))
    assert len(first_rows(source(chain_sum={}), 0.0)) == 1
    with pytest.raises(DataError, match=reason):
        first_rows(wrong, 0.0)


def test_too_few_questions_are_refused():
    with pytest.raises(
        DataError, match=r"tasks\.tower_of_hanoi: found \d+ different questions in "
    ):
        list(generate(source(500, tower_of_hanoi={}), seed=0))


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match=r"Fix: .*install .*'reasoning-gym\S*'"):
        list(generate(source(spell_backward={}), seed=0))


def test_the_version_of_the_library_is_in_the_recipe(tmp_path):
    assert source_job(source(chain_sum={}), seed=3).spec.libraries[-1] == "reasoning_gym"
    assert source_job(source(chain_sum={}), seed=3).seed == 3
    assert "reasoning_gym" not in source_job(SourceConfig(), seed=3).spec.libraries
