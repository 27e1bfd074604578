"""UltraFeedback in the version that trained Zephyr: answers of models, scored by GPT-4.

Tunstall et al. 2023, "Zephyr: Direct Distillation of LM Alignment". The best of four answers is
compared with a random one of the others, which may have the same score.
"""

from __future__ import annotations

from functools import partial

from rlhf_pipeline.data.sources.adapter import Source, rated

SOURCES = (
    Source(
        name="HuggingFaceH4/ultrafeedback_binarized",
        kind="comparisons",
        description="answers of models scored by GPT-4, about 61,000 comparisons with ties",
        columns=("chosen", "rejected", "score_chosen", "score_rejected"),
        parse=partial(rated, chosen_rating="score_chosen", rejected_rating="score_rejected"),
        split="train_prefs",
    ),
)
