"""What answers show: repetition, diversity, refusals, results."""

import re
from collections.abc import Sequence

REFUSALS = (
    "i'm sorry", "i am sorry", "sorry,", "i apologize", "i cannot", "i can't", "i can not",
    "i won't", "i will not", "i'm not able", "i am not able", "i'm unable", "i am unable",
    "as an ai",
)  # fmt: skip
"""Openings of refusals, in lower case."""


def refuses(text: str) -> bool:
    """Whether an answer begins like a refusal (`REFUSALS`).

    A heuristic for English: it misses other wordings, and counts an apology before an answer.
    """
    return text.strip().lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").startswith(REFUSALS)


def repetition(text: str, n: int = 3) -> float:
    """Share of a text's n-grams that it contained before, in [0, 1]; words end at white space."""
    found = _ngrams(text, n)
    return 1 - len(set(found)) / len(found) if found else 0.0


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Distinct n-grams over all n-grams of all texts together, in [0, 1]; words end at white space.

    A low value shows that a policy repeats itself, within a response or between prompts. The value
    falls with the number and the length of the texts: compare models on equal prompts. 0 if no text
    has n words.

    Source: Li et al., https://arxiv.org/abs/1510.03055, who divide by the number of words instead.
    """
    ngrams = [ngram for text in texts for ngram in _ngrams(text, n)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def _ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    words = text.split()
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


FINAL = re.compile(r"####|\\boxed\{|\banswer(?:\s+is:?|:)", re.IGNORECASE)


def final_answer(text: str) -> str:
    r"""The result that a text names, without separators of thousands; all of it if it names none.

    It is the rest of the line after the last `####`, `\boxed{`, "answer:" or "answer is", without
    marks of Markdown and TeX around it.
    """
    *before, last = FINAL.split(text.strip())
    found = last.strip().partition("\n")[0] if before else last
    return re.sub(r"(?<=\d),(?=\d{3})", "", found.strip(" \t*_`$}.") or text.strip())
