"""Find texts that nearly repeat a held-out one.

Two texts are near duplicates if the Jaccard similarity of their sets of word 5-grams is at least
0.8; a text of fewer words is one gram. Grams that more than 100 held-out texts share, as those of a
common instruction do, do not count: so a gram leads to at most 100 held-out texts. The search is
exact: an inverted index counts the grams that a text shares with every held-out one (ScanCount in
Li, Lu and Lu 2008, "Efficient Merging and Filtering Algorithms for Approximate String Searches").
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, chain

import numpy as np

from rlhf_pipeline.data.records import normalized

_WORDS = 5
_COMMON = 100


def near_duplicates(texts: Iterable[str], held_out: Iterable[str]) -> np.ndarray:
    """Whether each of the texts is a near duplicate of a held-out one: (N,) bool.

    Memory grows with the held-out texts alone; the others are streamed.
    """
    whole = [_grams(text) for text in held_out]
    common = {gram for gram, n in Counter(chain.from_iterable(whole)).items() if n > _COMMON}

    def telling(grams: set[str]) -> set[str]:
        """Without common grams; of nothing else, one gram that stands for all of them."""
        return grams - common or {" ".join(sorted(grams))}

    numbers: dict[str, int] = {}
    grams_of_all, sizes = array("q"), np.empty(len(whole), np.int64)
    for index, grams in enumerate(map(telling, whole)):
        grams_of_all.extend(numbers.setdefault(gram, len(numbers)) for gram in grams)
        sizes[index] = len(grams)
    # The held-out texts with gram g are holders[starts[g] : starts[g + 1]].
    holders = np.repeat(np.arange(len(whole)), sizes)[np.argsort(grams_of_all, kind="stable")]
    starts = [0, *np.bincount(grams_of_all, minlength=len(numbers)).cumsum().tolist()]

    def is_near(grams: set[str]) -> bool:
        found = numbers.keys() & grams
        if 5 * len(found) < 4 * len(grams):  # most texts: all shared grams together are too few
            return False
        owners = [holders[starts[n] : starts[n + 1]] for n in map(numbers.__getitem__, found)]
        shared = np.bincount(np.concatenate(owners), minlength=len(whole))
        # shared / (own + sizes - shared) >= 4 / 5
        return bool((9 * shared >= 4 * (len(grams) + sizes)).any())

    return np.fromiter((is_near(telling(_grams(text))) for text in texts), np.bool_)


def _grams(text: str) -> set[str]:
    """All runs of five words of a normalized text, or the text itself if it is shorter."""
    text = normalized(text)
    starts = [0, *accumulate(len(word) + 1 for word in text.split(" "))]
    return {text[start : end - 1] for start, end in zip(starts, starts[_WORDS:])} or {text}  # noqa: B905
