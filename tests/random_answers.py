"""Answers of imagined policies, with scores around their quality."""

import numpy as np

from rlhf_pipeline.verdict.answers import Answer

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in "aeiou"]
PROMPTS = 200
TEXTS = [" ".join(np.random.default_rng(row).choice(WORDS, 12)) for row in range(2 * PROMPTS)]


def policy(rng, quality, *, kl=2.0, length=12, ended=0.95, spread=1.0, texts=None):
    """The answers of a policy: the gold score is normal around `quality`, prompts differ."""
    difficulty = np.random.default_rng(1).normal(0, 0.5, PROMPTS)
    scores = quality + difficulty + rng.normal(0, spread, PROMPTS)
    first = rng.integers(PROMPTS)  # two policies hardly ever give the same answers
    texts = texts or TEXTS[first : first + PROMPTS]
    return [
        Answer(row, f"User: {row}", text, {"score": score, "gold": score}, kl, -20.0,
               length, bool(rng.random() < ended))
        for row, (text, score) in enumerate(zip(texts, scores, strict=True))
    ]  # fmt: skip
