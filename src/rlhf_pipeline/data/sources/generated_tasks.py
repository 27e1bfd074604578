"""Tasks of the library reasoning-gym: questions that it generates, with their true answers."""

from collections.abc import Iterator
from dataclasses import fields
from itertools import cycle, islice
from random import Random
from typing import Any

from rlhf_pipeline.config.split import TASKS, SourceConfig
from rlhf_pipeline.data.records import Example, normalized
from rlhf_pipeline.data.sources.adapter import Records, Source, question
from rlhf_pipeline.errors import ConfigError, DataError, install, suggestion


def generate(config: SourceConfig, seed: int) -> Records:
    """Yield `config.samples` different questions, the tasks in turn, the same for equal seeds.

    Raises ConfigError without the library; DataError for what it does not know or cannot generate.
    """
    samples, tasks = config.samples or 0, config.tasks or {}
    draws = 2 * -(-samples // len(tasks)) + 1_000  # some of them repeat a question
    asked = [_questions(name, given, seed, draws) for name, given in tasks.items()]
    for index, questions in enumerate(islice(cycle(asked), samples)):
        yield f"{TASKS}:{index}", next(questions)


def _questions(name: str, given: dict[str, Any], seed: int, draws: int) -> Iterator[Example]:
    _check(name, given)
    from reasoning_gym import create_dataset

    # The library draws from the seed plus the number, so neighbouring seeds would share questions.
    own_seed, seen = Random(f"{seed} {name}").getrandbits(31), set[str]()
    try:
        task = create_dataset(name, **given, seed=own_seed, size=draws)
        for entry in map(task.__getitem__, range(draws)):
            if entry["answer"] is None:
                raise DataError(
                    f"tasks.{name}: found a question with several right answers, expected one to "
                    "compare with. Fix: remove the task"
                )
            identity, answer = normalized(entry["question"]), entry["answer"].strip()
            if answer and identity not in seen:
                seen.add(identity)
                yield Example(question(entry["question"]), reference=answer)
    except DataError:
        raise
    except Exception as error:  # the tasks have no common base class of errors
        raise DataError(
            f"tasks.{name}: reasoning_gym refuses {given}: {type(error).__name__}: {error}. Fix: "
            "correct its parameters, or remove the task"
        ) from error
    raise DataError(
        f"tasks.{name}: found {len(seen)} different questions in {draws:,} draws, expected more. "
        "Fix: lower samples, or change the parameters of the task"
    )


def _check(name: str, given: dict[str, Any]) -> None:
    try:
        from reasoning_gym.factory import DATASETS  # here: it imports a thousand modules
    except ImportError:
        raise ConfigError(f"{TASKS}: the library is missing. Fix: {install('gym')}") from None
    if name not in DATASETS:
        raise DataError(
            f"tasks.{name}: unknown task{suggestion(name, DATASETS)}, expected one of reasoning_gym"
        )
    known = {field.name for field in fields(DATASETS[name][1])} - {"seed", "size"}
    for unknown in given.keys() - known:
        raise DataError(
            f"tasks.{name}.{unknown}: unknown parameter{suggestion(unknown, known)}; the "
            f"parameters there are {', '.join(sorted(known))}"
        )


SOURCES = (Source(TASKS, "prompts", generate=generate, libraries=("reasoning_gym",)),)
