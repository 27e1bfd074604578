from __future__ import annotations

from rlhf_pipeline.data.records import Message, key, normalized_prompt


def identity(*turns: tuple[str, str]) -> str:
    return normalized_prompt(tuple(Message(*turn) for turn in turns))


# --- which prompts are the same -------------------------------------------------------------------


def test_roles_and_words_remain() -> None:
    assert (
        identity(("system", "Be  kind."), ("user", " Hello\n there "))
        == "system: be kind.\nuser: hello there"
    )


def test_case_white_space_and_unicode_form_do_not_count() -> None:
    plain = identity(("user", "Straße fi 1"))
    assert plain == "user: strasse fi 1"
    assert (
        identity(("user", "STRASSE\t\ufb01\u00a0\uff11")) == plain
    )  # the ligature fi, a hard space, a full-width 1
    assert (
        identity(("user", "\u210cello")) == "user: hello"
    )  # a black-letter H is a capital letter only as NFKC
    accents = ("e\u0301", "\u00e9")  # e with an accent, as two characters and as one
    assert {identity(("user", accent)) for accent in accents} == {"user: \u00e9"}


def test_case_folding_is_followed_by_normalization() -> None:
    # The folded form of U+0390 is iota with two accents in three characters; NFKC makes it the one
    # character again.
    assert "\u0390".casefold() == "\u03b9\u0308\u0301"
    assert identity(("user", "\u0390")) == "user: \u0390"


def test_roles_count() -> None:
    assert identity(("user", "a"), ("assistant", "b")) != identity(("user", "a"), ("user", "b"))
    assert identity(("user", "a user: b")) != identity(("user", "a"), ("user", "b"))
    assert identity(("system", "a"), ("user", "b")) != identity(("user", "b"))


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_is_the_beginning_of_sha256_over_lengths_and_contents() -> None:
    # printf '2:ab1:c' | sha256sum; of the accented letter its two bytes of UTF-8: printf
    # '2:\xc3\xa9' | sha256sum
    assert key("ab", "c").hex() == "430fb1b4ac43316eca81fab27a1930ab"
    assert key("\u00e9").hex() == "2f23c71856587c2a6ffdb64f0e11e994"


def test_boundaries_between_texts_count() -> None:
    texts = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc"), ("ab1:c",)]
    assert len({key(*each) for each in texts}) == 6
