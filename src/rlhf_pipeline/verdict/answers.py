"""The answers of policies: their record and its file, the scores of judges, and what texts show.

The driver imports this module, so it must not import torch.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from rlhf_pipeline.config.rewards import GOLD, JUDGE_MODEL, REWARD_MODEL
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.manifest import verified

ANSWERS = "answers.jsonl"  # file of an evaluation with every answer of every policy


@dataclass(frozen=True)
class Answer:
    """The answer of one policy to one prompt, a line of `answers.jsonl`."""

    row: int
    prompt: str
    response: str
    scores: dict[str, float | None]  # by judge; None if the judge has none for this prompt
    kl: float | None = None
    """log pi(response) - log pi_sft(response), nats. None: the baseline has other tokens, the
    answer was not sampled (temperature 0), or it is a text alone."""
    sft_logprob: float | None = None  # log pi_sft(response), nats
    response_tokens: int = 0  # words of a text alone
    ended: bool | None = None  # None: a text alone
    source: str | None = None  # name of the prompt's source
    messages: list[dict[str, str]] | None = None  # the prompt
    draw: int = 0  # number of this answer among those of the policy to this prompt
    right: tuple[float, float] | None = None
    """Whether it agrees with the true answer, 1 or 0: strictly and leniently; see `accuracy`."""
    episode: dict[str, Any] | None = None
    """The record of its turns, `episodes.partner.Episode`; `response` is their text."""

    @property
    def final(self) -> str:
        """The last turn of the policy."""
        return self.episode["answer"] if self.episode else self.response

    def scored(self, judge: str, score: float) -> Self:
        """The answer with a further score."""
        return replace(self, scores=self.scores | {judge: score})


def score_name(judge: str) -> str:
    """Name of a judge's scores in metrics and records: `score`, `gold_score`, `<judge>_score`."""
    return judge if judge == REWARD_MODEL else f"{judge}_score"


def judge_title(name: str) -> str:
    """The name of a judge as it stands in a sentence."""
    models = {REWARD_MODEL: "the reward model", JUDGE_MODEL: "the second reward model"}
    return models.get(name, f"the {name} judge")


def write_answers(answers: dict[str, list[Answer]], folder: Path) -> None:
    """Write the answers of all policies, one line for each; each score is a field."""
    lines = []
    for policy, given in answers.items():
        for fields in map(asdict, given):
            scores = {score_name(judge): x for judge, x in fields.pop("scores").items()}
            lines.append(json.dumps({"policy": policy} | fields | scores))
    (folder / ANSWERS).write_text("\n".join(lines) + "\n")


def read_answers(folder: Path) -> dict[str, list[Answer]]:
    """The answers of an evaluation, by policy. Raises ArtifactError if they were changed."""
    answers: dict[str, list[Answer]] = {}
    for line in verified(folder, ANSWERS).read_text().splitlines():
        fields = json.loads(line)
        names = [name for name in fields if name.endswith("score")]
        scores = {name.removesuffix("_score"): fields.pop(name) for name in names}
        answers.setdefault(fields.pop("policy"), []).append(Answer(scores=scores, **fields))
    return answers


def complete_judges(answers: list[Answer]) -> list[str]:
    """The judges, in their order. The gold score takes part only if every answer has one. Raises
    StageError if another judge has no score for an answer."""
    missing = Counter(judge for a in answers for judge, score in a.scores.items() if score is None)
    for judge in missing.keys() - {GOLD}:
        raise StageError(
            f"evaluate.judges: found {missing[judge]} of {len(answers)} answers without a score of "
            f"{judge}, expected none. Fix: make it score every prompt of the test, or remove it"
        )
    return [judge for judge in answers[0].scores if judge not in missing]


def by_prompt(answers: list[Answer], value: Callable[[Answer], Any]) -> list[list[float]]:
    """A value of each answer, by prompt: answers to one prompt follow each other."""
    return [[value(a) for a in given] for _, given in groupby(answers, key=lambda a: a.row)]


def scores_by(answers: list[Answer], judge: str) -> list[list[float]]:
    """The scores of a judge that scored every answer, by prompt."""
    return by_prompt(answers, lambda a: float(a.scores[judge]))  # type: ignore[arg-type]


def opponents(answers: list[Answer], drawn: list[Answer]) -> list[Answer]:
    """The baseline's answer that a judge of pairs sees beside each answer: that of the next draw
    among `drawn`, all draws of the baseline."""
    known, draws = {(a.row, a.draw): a for a in drawn}, len({a.draw for a in drawn})
    return [known[a.row, (a.draw + 1) % draws] for a in answers]


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
