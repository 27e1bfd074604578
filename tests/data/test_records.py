import pytest

from rlhf_pipeline.data.records import Message, key, normalized_prompt


@pytest.mark.parametrize(
    ("turns", "known"),
    [
        ([("system", "Be  kind."), ("user", " Hello\n there ")],
         "system: be kind.\nuser: hello there"),
        ([("user", "Straße fi 1")], "user: strasse fi 1"),
        # The ligature fi, a hard space, a full-width 1; a black-letter H, a capital only as NFKC.
        ([("user", "STRASSE\t\ufb01\u00a0\uff11")], "user: strasse fi 1"),
        ([("user", "\u210cello")], "user: hello"),
        ([("user", "e\u0301")], "user: \u00e9"),
        # The folded form of U+0390 is three characters; NFKC makes it the one again.
        ([("user", "\u0390")], "user: \u0390"),
        ([("user", "a user: b")], "user: a user: b"),
        ([("user", "a"), ("assistant", "b")], "user: a\nassistant: b"),
    ],
)  # fmt: skip
def test_case_white_space_and_unicode_form_do_not_count(turns, known):
    assert normalized_prompt(tuple(Message(*turn) for turn in turns)) == known


def test_a_key_is_the_beginning_of_sha256_over_lengths_and_contents():
    # printf '2:ab1:c' | sha256sum; of the accented letter its two bytes of UTF-8: printf
    # '2:\xc3\xa9' | sha256sum
    assert key("ab", "c").hex() == "430fb1b4ac43316eca81fab27a1930ab"
    assert key("\u00e9").hex() == "2f23c71856587c2a6ffdb64f0e11e994"
    # Boundaries between texts count.
    texts = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc"), ("ab1:c",)]
    assert len({key(*each) for each in texts}) == 6
