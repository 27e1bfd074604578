"""Near duplicates: texts whose 5-grams of words have a Jaccard similarity of at least 0.8."""

import pytest

from rlhf_pipeline.data.blend import near_duplicates

TWELVE = "a b c d e f g h i j k l"  # 8 grams: a-e, b-f, ... h-l


@pytest.mark.parametrize(
    ("text", "near"),
    [
        (TWELVE, True),
        ("A  B c\nd e f g h i j k l", True),  # case and white space do not count
        (f"{TWELVE} m", True),  # 8 of 9 grams
        (f"{TWELVE} m n", True),  # 8 of 10: exactly 0.8
        (f"{TWELVE} m n o", False),  # 8 of 11
        ("a b c d e f g h i j k", True),  # 7 of 8
        ("a b c d e f g h i j", False),  # 6 of 8
        ("a b c d e f g h i j k X", False),  # 7 of 9
        ("l k j i h g f e d c b a", False),
    ],
)
def test_the_similarity_of_word_grams_decides(text: str, near: bool) -> None:
    found = near_duplicates([text], ["nothing like it at all here", TWELVE])
    assert found.tolist() == [near]
    assert near_duplicates([TWELVE], [text]).tolist() == [near]


@pytest.mark.parametrize(
    ("text", "near"), [("What is 17 + 25?", False), ("what IS  17 - 25?", True), ("17", False)]
)
def test_a_text_of_few_words_must_be_equal(text: str, near: bool) -> None:
    assert near_duplicates([text], ["What is 17 - 25?"]).tolist() == [near]


def test_one_result_for_each_text_in_order() -> None:
    assert near_duplicates(["x", TWELVE, "y"], [TWELVE]).tolist() == [False, True, False]
    assert near_duplicates(["x"], []).tolist() == [False]
    assert near_duplicates([], ["x"]).tolist() == []


def test_the_search_finds_what_comparing_all_pairs_finds() -> None:
    # Texts of a cyclic alphabet: "0 1 2 ... 29" and the same with some words replaced.
    words = [str(number) for number in range(30)]
    texts = [
        " ".join("-" if index == at else word for index, word in enumerate(words[:length]))
        for length in range(20, 31)
        for at in (0, 1, 5, 99)
    ]

    def grams(text: str) -> set[tuple[str, ...]]:
        split = text.split()
        return {tuple(split[start : start + 5]) for start in range(len(split) - 4)}

    for known in texts:
        one = grams(known)
        similarities = [len(one & grams(text)) / len(one | grams(text)) for text in texts]
        expected = [similarity >= 0.8 for similarity in similarities]
        assert near_duplicates(texts, [known]).tolist() == expected


def test_an_instruction_that_all_prompts_share_does_not_count() -> None:
    instruction = " ".join(f"step{number}" for number in range(200))
    rest = "{0}a {0}b {0}c {0}d {0}e {0}f {0}g {0}h {0}i {0}j"
    held_out = [f"{instruction} {rest.format(number)}" for number in range(101)]
    texts = [f"{instruction} {rest.format(number)}" for number in (7, 500)]
    # With its 196 grams, 206 and 206 would share 196 of 216.
    assert near_duplicates(texts, held_out).tolist() == [True, False]
    # 100 prompts are too few to tell an instruction from a repeated prompt.
    assert near_duplicates(texts[1:], held_out[:100]).tolist() == [True]
    assert near_duplicates([instruction], [*held_out, instruction]).tolist() == [True]
