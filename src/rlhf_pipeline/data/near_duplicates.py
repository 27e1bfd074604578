"""Find texts that nearly repeat a held-out one.

Two texts are near duplicates if the Jaccard similarity of their sets of word 5-grams is at least
0.8; a text of fewer words is one gram. Grams that more than 100 held-out texts share, as those of a
common instruction do, do not count: so a gram leads to at most 100 comparisons. The search is
exact, by prefix filtering (Chaudhuri, Ganti and Kaushik 2006, "A Primitive Operator for Similarity
Joins in Data Cleaning"): two such sets share one of their rarest grams, so few pairs are compared.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import accumulate
from math import ceil

import numpy as np

from rlhf_pipeline.data.records import normalized

_WORDS = 5
_COMMON = 100


def near_duplicates(texts: Iterable[str], held_out: Iterable[str]) -> np.ndarray:
    """Whether each of the texts is a near duplicate of a held-out one: (N,) bool.

    Memory grows with the held-out texts alone; the others are streamed.
    """
    whole = [_grams(text) for text in held_out]
    frequency = Counter(gram for grams in whole for gram in grams)
    common = {gram for gram, count in frequency.items() if count > _COMMON}

    def telling(grams: set[str]) -> set[str]:
        """Without common grams; of nothing else, one gram that stands for all of them."""
        return grams - common or {" ".join(sorted(grams))}

    known = [telling(grams) for grams in whole]
    by_gram: defaultdict[str, list[int]] = defaultdict(list)

    def rarest(grams: set[str]) -> list[str]:
        """Similar sets have one of these in common, as they share 4/5 of each one's grams."""
        ordered = sorted(grams, key=lambda gram: (frequency[gram], gram))
        return ordered[: len(grams) - ceil(4 * len(grams) / 5) + 1]

    for index, grams in enumerate(known):
        for gram in rarest(grams):
            by_gram[gram].append(index)

    def is_near(grams: set[str]) -> bool:
        if by_gram.keys().isdisjoint(grams):  # most texts, without sorting
            return False
        found = {index for gram in rarest(grams) for index in by_gram.get(gram, ())}
        return any(5 * len(grams & known[one]) >= 4 * len(grams | known[one]) for one in found)

    return np.fromiter((is_near(telling(_grams(text))) for text in texts), np.bool_)


def _grams(text: str) -> set[str]:
    """All runs of five words of a normalized text, or the text itself if it is shorter."""
    text = normalized(text)
    starts = [0, *accumulate(len(word) + 1 for word in text.split(" "))]
    return {text[start : end - 1] for start, end in zip(starts, starts[_WORDS:])} or {text}  # noqa: B905
