"""The judges that read texts and need no model, and the evaluation of lists of texts by them.

This module imports neither transformers nor DeepSpeed, whose imports take seconds.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_pipeline.config.block import validated
from rlhf_pipeline.config.doors import defined, parameters, source_file
from rlhf_pipeline.config.evaluate import GOLD, JUDGE_PREFIX, EvaluateConfig
from rlhf_pipeline.config.rewards import (
    CallableReward,
    CodeReward,
    ReferenceReward,
    RegexReward,
    RubricReward,
)
from rlhf_pipeline.data.records import Conversation
from rlhf_pipeline.data.sources.synthetic import gold_score
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.evaluation.comparison import Answer, compare
from rlhf_pipeline.evaluation.report import Evaluation
from rlhf_pipeline.rollout.chat_model import ChatModel, RubricSource, reply_folder
from rlhf_pipeline.rollout.code_reward import CodeSource
from rlhf_pipeline.rollout.function_reward import FunctionSource, matches
from rlhf_pipeline.rollout.records import Answered, Scored
from rlhf_pipeline.rollout.true_answers import AGREES, accuracy
from rlhf_pipeline.runtime.job import LaunchedJob


@dataclass(frozen=True)
class AnswerBatch:
    """What a judge gets: the answers of one policy to the prompts of this rank, B rows."""

    scored: Scored
    """Prompts and answers as tokens, with the log-probabilities of the policy and of SFT."""
    text: Answered  # prompts as messages, answers as texts, and the true answers where known
    sources: list[str]  # name of each prompt's source


Judge = Callable[[AnswerBatch], Sequence[float | None]]
"""Scores each answer; higher is better. None for a prompt that it cannot judge."""


def by_gold(answers: AnswerBatch) -> list[float | None]:
    """The true quality of each answer. No model was trained on these scores directly."""
    rows = zip(answers.sources, answers.text.prompts, answers.text.responses, strict=True)
    return [gold_score(*row) for row in rows]


def by_source(answers: AnswerBatch, source: Callable[[Scored, Answered], Tensor]) -> list[float]:
    """The score of a source of rewards: a Python function, or another reward model."""
    return list(source(answers.scored, answers.text).tolist())


def by_reference(answers: AnswerBatch, agrees: Callable[[str, str], bool]) -> list[float | None]:
    """1 for an answer that agrees with the true answer, else 0."""
    rows = zip(answers.text.references, answers.text.responses, strict=True)
    return [None if true is None else float(agrees(true, given)) for true, given in rows]


def load_judges(
    job: LaunchedJob,
    config: EvaluateConfig,
    functions: Mapping[int, Callable[..., Any]] | None = None,
    counts: dict[str, Counter[str]] | None = None,
) -> dict[str, Judge]:
    """The judges that need no model, by their names; `functions` are those that are at hand.
    `counts` gets the `REPLIES` to each rubric, which grow as it judges.

    Raises StageError if a function cannot be imported, or does not take prompts and responses.
    """
    judges: dict[str, Judge] = {GOLD: by_gold}
    for index, judge in enumerate(config.judges):
        if isinstance(judge, CallableReward):
            function = (functions or {}).get(index)
            source = FunctionSource.load(judge, job, f"{JUDGE_PREFIX}{index}", function)
            judges[judge.label] = partial(by_source, source=source)
        elif isinstance(judge, ReferenceReward):
            judges[judge.label] = partial(by_reference, agrees=AGREES[judge.reference])
        elif isinstance(judge, RegexReward):
            judges[judge.label] = partial(by_source, source=matches(judge.regex))
        elif isinstance(judge, RubricReward):
            model = ChatModel(judge.openai, reply_folder(job), config.place_of(judge))
            judges[judge.label] = partial(by_source, source=RubricSource(judge, model))
            (counts if counts is not None else {})[judge.label] = model.counts
        elif isinstance(judge, CodeReward):
            code = CodeSource(judge, config.place_of(judge))
            judges[judge.label] = partial(by_source, source=code)
    return judges


def evaluate(
    prompts: Sequence[str | Conversation],
    answers: Sequence[str],
    baseline_answers: Sequence[str],
    judges: Sequence[Callable[..., Sequence[float]] | str | Mapping[str, Any]],
    *,
    references: Sequence[str] | None = None,
    trained_on: Collection[str] = (),
) -> Evaluation:
    """Whether judges prefer `answers` to `baseline_answers`, one of each to every prompt.

    The statistics are those of stage `evaluate` for equal draws, without what only a model knows,
    such as KL; lengths are words. Raises ConfigError if a list has another length, or a judge reads
    more than it gets, and StageError if a judge fails.

    Args:
        prompts: messages of the user, or conversations.
        judges: functions and true answers as in `evaluate.judges`; a function may stand in the
            place of its name. The first one that is not in `trained_on` decides.
        references: the true answer to each prompt.
        trained_on: names of the judges that the candidate was trained on.
    """
    turns = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]
    lists = {"answers": [*answers], "baseline_answers": [*baseline_answers]}
    if references is not None:
        lists["references"] = [*references]
    for name, texts in lists.items():
        if not turns or len(texts) != len(turns) or not all(isinstance(t, str) for t in texts):
            raise ConfigError(
                f"{name}: found {len(texts)} values, expected {len(turns) or 'some'} texts, one "
                "for each prompt"
            )
    true: list[Any] = lists.get("references", [None] * len(turns))
    config, found = _text_judges(judges, {*lists})

    def judged(name: str) -> list[Answer]:
        text = Answered(turns, true, [each.strip() for each in lists[name]])
        batch = AnswerBatch(None, text, [""] * len(turns))  # type: ignore[arg-type]
        scores = {label: judge(batch) for label, judge in found.items()}
        return [
            Answer(
                row=row,
                prompt="",
                response=answer,
                scores={label: given[row] for label, given in scores.items()},
                response_tokens=len(answer.split()),
                right=accuracy(true[row], answer),
            )
            for row, answer in enumerate(text.responses)
        ]

    policies = {"baseline": judged("baseline_answers"), "candidate": judged("answers")}
    evaluation = compare(policies, config, trained_on, rewards=sorted(trained_on))
    del evaluation["decoding"]  # nobody knows where the texts come from
    return Evaluation(evaluation)


def _text_judges(
    given: Sequence[Any], offered: set[str]
) -> tuple[EvaluateConfig, dict[str, Judge]]:
    """The judges as parameters and as functions; `offered` is what there is beside the texts."""
    blocks = [dict(one) if isinstance(one, Mapping) else {"callable": one} for one in given]
    functions = {i: b["callable"] for i, b in enumerate(blocks) if callable(b.get("callable"))}
    for index, function in functions.items():
        name = getattr(function, "__name__", type(function).__name__).strip("<>")  # of a lambda
        blocks[index]["callable"] = f"{function.__module__}:{name}"
    config, faults = validated("evaluate", EvaluateConfig, {"judges": blocks})
    if not isinstance(config, EvaluateConfig) or not config.judges:
        raise ConfigError("\n".join(faults or ["judges: found none, expected at least one"]))
    inputs = {}
    for index, judge in enumerate(config.judges):
        by_truth = isinstance(judge, ReferenceReward | CodeReward)
        asked = {"references" if by_truth else "a model"}
        asked -= {"a model"} if isinstance(judge, RegexReward) else set()
        if isinstance(judge, CallableReward) and index in functions:
            asked = {*inspect.signature(functions[index]).parameters}
        elif isinstance(judge, CallableReward):
            inputs[f"{JUDGE_PREFIX}{index}"] = source_file(judge.callable)
            asked = parameters(defined(judge.callable))
        if lacking := asked & {"references", "scored", "a model"} - offered:
            raise ConfigError(
                f"evaluate.judges.{index}: found {judge.label}, which needs {lacking.pop()}, "
                "expected a judge of texts. Fix: pass references, or let stage evaluate ask it"
            )
    job = LaunchedJob("evaluate", "", 0, {}, inputs, {}, Path(), 0.0)
    return config, load_judges(job, config, functions)
