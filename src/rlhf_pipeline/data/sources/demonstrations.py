"""Sources with columns for a question and its answer.

Revision CONVERTED marks the repositories with a loading script.
"""

from collections.abc import Callable
from typing import Any

from rlhf_pipeline.data.records import Example
from rlhf_pipeline.data.sources.adapter import (
    CONVERTED,
    Row,
    SkippedRowError,
    Source,
    field,
    items,
    question,
    text,
)


def _source(
    name: str, description: str, *columns: str, parse: Callable[[Row], Example] | None = None,
    **hub: Any,
) -> Source:  # fmt: skip
    """Without `parse`, all columns are texts: the last one is the answer, the others the prompt."""
    *asked, answer = columns

    def parse_texts(row: Row) -> Example:
        return Example(question(*(text(row, column) for column in asked)), text(row, answer))

    return Source(name, "demonstrations", description, columns, parse or parse_texts, **hub)


def _parse_hc3(row: Row) -> Example:
    """The question and the first answer by a person. The answers by ChatGPT are not read."""
    answers = items(row, "human_answers", str)
    if not answers:
        raise SkippedRowError("no person has answered the question")
    return Example(question(text(row, "question")), answers[0])


def _parse_paragraph(row: Row) -> Example:
    """The first question about a paragraph, and the paragraph."""
    questions = items(row, "questions", str)
    if not questions:
        raise SkippedRowError("the paragraph has no question")
    return Example(question(questions[0]), text(row, "paragraph"))


def _parse_tldr(row: Row) -> Example:
    """The post, which ends with "TL;DR:", and its summary without the space between them."""
    return Example(question(text(row, "prompt")), text(row, "completion").strip())


def _mkqa(language: str, code: str) -> Source:
    """Of several equally correct answers, the first is used."""

    def parse(row: Row) -> Example:
        answers = items(field(row, "answers", dict), code, dict)
        if not answers or answers[0].get("text") is None:
            raise SkippedRowError("the question has no short answer")
        return Example(question(text(field(row, "queries", dict), code)), text(answers[0], "text"))

    return _source(
        f"mkqa-{language}",
        f"{language}: questions with short answers, 10,000 with those that have none",
        "queries", "answers", parse=parse, hub="apple/mkqa", revision=CONVERTED,
    )  # fmt: skip


SOURCES = (
    # Conover et al. 2023, "Free Dolly: Introducing the World's First Truly Open Instruction-Tuned
    # LLM". Few instructions have a context.
    _source(
        "databricks/databricks-dolly-15k",
        "instructions and answers written by people, about 15,000",
        "instruction", "context", "response",
    ),
    # Taori et al. 2023, "Stanford Alpaca: An Instruction-following LLaMA model". A few rows have no
    # output and count as bad: set `max_bad_fraction` to 0.001.
    _source(
        "tatsu-lab/alpaca",
        "instructions and answers written by a model, about 52,000; a few without an answer",
        "instruction", "input", "output",
    ),
    _source(
        "wangrui6/Zhihu-KOL",
        "Chinese: questions and answers of Zhihu, about a million",
        "INSTRUCTION", "RESPONSE",
    ),
    # Völske et al. 2017, "TL;DR: Mining Reddit to Learn Automatic Summarization".
    _source(
        "trl-lib/tldr",
        "Reddit posts with their authors' summaries, about 117,000",
        "prompt", "completion", parse=_parse_tldr,
    ),
    # Guo et al. 2023, "How Close is ChatGPT to Human Experts?". Subset "all" contains all others.
    _source(
        "Hello-SimpleAI/HC3-Chinese",
        "Chinese: questions of seven fields answered by people, about 12,900",
        "question", "human_answers", parse=_parse_hc3, revision=CONVERTED, subset="all",
    ),
    # Longpre et al. 2020, "MKQA: A Linguistically Diverse Benchmark for Multilingual Open Domain
    # Question Answering". People translated the questions.
    _mkqa("Chinese", "zh_cn"),
    _mkqa("Japanese", "ja"),
    # Ushio et al. 2022, "Generative Language Models for Paragraph-Level Question Generation". As in
    # DeepSpeed-Chat, the answer is the text that contains it, not the few words of column `answer`.
    _source(
        "lmqg/qg_jaquad",
        "Japanese: questions with the sentence of Wikipedia that answers them",
        "question", "sentence", revision=CONVERTED,
    ),
    _source(
        "lmqg/qag_jaquad",
        "Japanese: questions with the paragraph of Wikipedia that answers them",
        "questions", "paragraph", parse=_parse_paragraph, revision=CONVERTED,
    ),
)  # fmt: skip
