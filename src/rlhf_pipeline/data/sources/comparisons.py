"""Sources with a column for each of two answers, which are texts or lists of messages.

Revision CONVERTED marks the repositories with a loading script.
"""

import re
from collections.abc import Callable
from typing import Any

from rlhf_pipeline.data.records import Example, Message
from rlhf_pipeline.data.sources.adapter import (
    CONVERTED,
    MalformedRowError,
    Row,
    SkippedRowError,
    Source,
    compared,
    field,
    items,
    messages,
    number,
    preferred,
    question,
    text,
)

_CITATION = re.compile(r" ?\[\d+(?:, ?\d+)*\]")


def _source(
    name: str, description: str, *columns: str, parse: Callable[[Row], Example], **hub: Any
) -> Source:
    return Source(name, "comparisons", description, columns, parse, **hub)


def _rated(
    name: str, description: str, chosen_rating: str, rejected_rating: str, **hub: Any
) -> Source:
    """A source of two dialogues and their ratings; equal ratings are skipped."""

    def parse(row: Row) -> Example:
        if number(row, chosen_rating) == number(row, rejected_rating):
            raise SkippedRowError("the two answers have the same score")
        return compared(
            *(messages(field(row, column, list), column) for column in ("chosen", "rejected"))
        )

    columns = ("chosen", "rejected", chosen_rating, rejected_rating)
    return _source(name, description, *columns, parse=parse, **hub)


def _parse_instruction(row: Row) -> Example:
    return Example(question(text(row, "prompt")), text(row, "chosen"), text(row, "rejected"))


def _parse_tldr(row: Row) -> Example:
    """The post, which ends with "TL;DR:", and two summaries without the space between them."""
    return Example(
        question(text(row, "prompt")), text(row, "chosen").strip(), text(row, "rejected").strip()
    )


def _parse_orca(row: Row) -> Example:
    """`status` is "tie" for equal ratings."""
    if text(row, "status") == "tie":
        raise SkippedRowError("the two answers have the same score")
    prompt, system = question(text(row, "input")), text(row, "system")
    if system.strip():
        prompt = (Message("system", system), *prompt)
    return Example(prompt, text(row, "chosen"), text(row, "rejected"))


def parse_webgpt(row: Row) -> Example:
    """Answers cite sources by number, which a model without a browser must not learn.

    The citations are removed; other brackets stay.
    """
    return preferred(
        question(text(field(row, "question", dict), "full_text")),
        (_CITATION.sub("", text(row, "answer_0")), _CITATION.sub("", text(row, "answer_1"))),
        (number(row, "score_0"), number(row, "score_1")),
    )


def _parse_shp(row: Row) -> Example:
    """`labels` is 1 if A is preferred, 0 if B is."""
    label = number(row, "labels")
    if label not in (0, 1):
        raise MalformedRowError("column 'labels' is neither 0 nor 1")
    return preferred(
        question(text(row, "history")),
        (text(row, "human_ref_A"), text(row, "human_ref_B")),
        (label, 1 - label),
    )


def _parse_miracl(row: Row) -> Example:
    """The first passage of each kind; without a negative passage, the row is a demonstration."""
    relevant, others = items(row, "positive_passages", dict), items(row, "negative_passages", dict)
    if not relevant:
        raise SkippedRowError("no passage answers the query")
    return Example(
        question(text(row, "query")),
        text(relevant[0], "text"),
        text(others[0], "text") if others else None,
    )


def _miracl(code: str, language: str) -> Source:
    return _source(
        f"Cohere/miracl-{code}-queries-22-12",
        f"{language}: queries with passages of Wikipedia that do and do not answer them",
        "query", "positive_passages", "negative_passages", parse=_parse_miracl,
    )  # fmt: skip


SOURCES = (
    _source(
        "Dahoas/synthetic-instruct-gptj-pairwise",
        "machine-written instructions, answers of a stronger and a weaker model, about 33,000 "
        "comparisons",
        "prompt", "chosen", "rejected", parse=_parse_instruction,
    ),
    # Stiennon et al. 2020, "Learning to summarize from human feedback".
    _source(
        "trl-lib/tldr-preference",
        "summaries of Reddit posts and news, compared by people, about 93,000 comparisons",
        "prompt", "chosen", "rejected", parse=_parse_tldr,
    ),
    # Nakano et al. 2021, "WebGPT: Browser-assisted question-answering with human feedback".
    _source(
        "openai/webgpt_comparisons",
        "long answers to questions, compared by people, about 19,600 comparisons with ties",
        "question", "answer_0", "answer_1", "score_0", "score_1",
        parse=parse_webgpt, revision=CONVERTED,
    ),
    # Ethayarajh et al. 2022, "Understanding Dataset Difficulty with V-Usable Information". No ties:
    # one comment has more votes although it was written later.
    _source(
        "stanfordnlp/SHP",
        "questions to 18 subreddits with two comments, compared by votes, about 349,000 "
        "comparisons",
        "history", "human_ref_A", "human_ref_B", "labels", parse=_parse_shp,
    ),
    # Zhang et al. 2023, "MIRACL: A Multilingual Retrieval Dataset Covering 18 Diverse Languages".
    _miracl("zh", "Chinese"),
    _miracl("ja", "Japanese"),
    # Tunstall et al. 2023, "Zephyr: Direct Distillation of LM Alignment". The best of four answers
    # is compared with a random one of the others, which may have the same score.
    _rated(
        "HuggingFaceH4/ultrafeedback_binarized",
        "answers of models scored by GPT-4, about 61,000 comparisons with ties",
        "score_chosen", "score_rejected", split="train_prefs",
    ),
    _rated(
        "argilla/dpo-mix-7k",
        "a small mix of the best of the other three, 6,750 comparisons",
        "chosen_rating", "rejected_rating",
    ),
    _rated(
        "argilla/ultrafeedback-binarized-preferences-cleaned",
        "UltraFeedback by the mean of its ratings, without the questions of TruthfulQA, about "
        "61,000 comparisons",
        "chosen-rating", "rejected-rating",
    ),
    _rated(
        "argilla/distilabel-capybara-dpo-7k-binarized",
        "dialogues of several turns, about 7,600 comparisons",
        "rating_chosen", "rating_rejected",
    ),
    _source(
        "argilla/distilabel-intel-orca-dpo-pairs",
        "Orca's instructions with rated answers, about 12,900 comparisons with ties",
        "system", "input", "chosen", "rejected", "status", parse=_parse_orca,
    ),
)  # fmt: skip
