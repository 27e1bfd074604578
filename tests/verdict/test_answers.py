"""What the texts of answers show, by hand."""

import pytest

from rlhf_pipeline.verdict.answers import distinct_n, final_answer, refuses, repetition


@pytest.mark.parametrize(
    ("texts", "n", "expected"),
    [
        (["a b a b"], 1, 0.5),  # a, b of a, b, a, b
        (["a b a b"], 2, 2 / 3),  # ab, ba of ab, ba, ab
        (["a b", "a c"], 1, 0.75),  # repeated from one text to the next
        (["a b", "b c"], 2, 1.0),  # no bigram across texts: ab, bc
        (["a  b\n", ""], 2, 1.0),  # white space is not a word
        (["a", "b"], 2, 0.0),  # no bigrams
    ],
)
def test_distinct_n(texts: list[str], n: int, expected: float):
    assert distinct_n(texts, n) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b c d", 0.0),
        ("a b c a b c", 0.25),  # abc, bca, cab, abc
        ("a a a a a", 2 / 3),
        ("a b", 0.0),  # no triple
    ],
)
def test_repetition_within_a_text(text: str, expected: float):
    assert repetition(text) == pytest.approx(expected, rel=1e-12)


def test_the_openings_of_refusals():
    assert refuses(" I\N{RIGHT SINGLE QUOTATION MARK}m sorry, but no.") and refuses("I CANNOT help")
    assert not refuses("I can. I'm sorry came later") and not refuses("")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("48/2 = 24\n#### 1,072\nDone.", "1072"),
        (r"So \boxed{72}.", "72"),
        ("Answer: no. The answer is **yes**", "yes"),
        (" 24 clips. ", "24 clips"),
        ("####", "####"),
    ],
)
def test_the_final_answer_follows_the_last_mark(text: str, expected: str):
    assert final_answer(text) == expected
