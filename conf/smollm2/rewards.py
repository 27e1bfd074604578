"""A reward that anyone can check: docs/smollm2.md."""

SHORTEST, LONGEST = 5, 12
ENDS = (".", "!", "?")


def one_sentence(prompts, responses):
    """1 for an answer that is one sentence of 5 to 12 words, else 0."""
    return [float(_is_one_sentence(response)) for response in responses]


def _is_one_sentence(text):
    words = text.split()
    inside = any(word.endswith(ENDS) for word in words[:-1])
    return SHORTEST <= len(words) <= LONGEST and text.endswith(ENDS) and not inside
