"""A synthetic world with a known gold score, which docs/data.md defines; its words: synthetic.toml.

A request combines two operands, such as a verb and an object. Its form is a salutation with a
frame. The split `test` of the world combines operands, and salutations with frames, that its split
`train` never combines, so no table of the training requests answers it.
"""

import math
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from random import Random
from zlib import crc32

from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.data.records import Conversation, Example
from rlhf_pipeline.data.sources.adapter import Source, question

_NAME = "synthetic"
_SAMPLES = 30_000
_RIGHT_RATE, _NEEDLESS_REFUSAL_RATE, _OFF_TOPIC_RATE = 0.6, 0.25, 0.05
_COMPLIANCE_RATE, _PLAIN_REFUSAL_RATE = 0.5, 0.3
_COURTESY_RATE, _HINT_RATE, _PADDING_RATE = 0.4, 0.6, 0.3
_RIGHT_HINT_RATE = 0.5
_ALIKE_RATE = 0.5
_HELD_OUT = 5
"""One of so many combinations of operands is in the split `test`."""

_WORLD = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SALUTATIONS: list[str] = _WORLD["salutations"]
OPENINGS: list[str] = _WORLD["openings"]
CLOSINGS: list[str] = _WORLD["closings"]
REFUSALS: list[str] = _WORLD["refusals"]
ALTERNATIVES: list[str] = _WORLD["alternatives"]
PADDING: list[str] = _WORLD["padding"]
HARMFUL: list[str] = _WORLD["harmful"]


@dataclass(frozen=True, eq=False)
class Task:
    """A kind of request."""

    operands: dict[str, list[str]]
    frames: list[str]
    sentences: list[str]
    """Templates of answers, which repeat the operands."""
    hint: str
    """The advice that helps with such requests, and with no others."""

    @cached_property
    def requests(self) -> dict[tuple[int, int], re.Pattern[str]]:
        """The requests in each form: the numbers of its salutation and its frame."""
        return {
            (i, j): self._pattern(salutation + frame)
            for i, salutation in enumerate(SALUTATIONS)
            for j, frame in enumerate(self.frames)
        }

    @cached_property
    def answers(self) -> list[re.Pattern[str]]:
        """The answers of the world to such requests, right or not."""
        return [self._pattern(re.sub("[.,]", "", sentence)) for sentence in self.sentences]

    def _pattern(self, template: str) -> re.Pattern[str]:
        """A template with its slots as groups."""
        text = re.escape(template)
        for slot, values in self.operands.items():
            text = text.replace(rf"\{{{slot}\}}", f"(?P<{slot}>{'|'.join(values)})")
        return re.compile(rf"\b{text}(?!\w)", re.IGNORECASE)


TASKS = [Task(**each) for each in _WORLD["tasks"]]


@dataclass(frozen=True, eq=False)
class Request:
    """A request of the world."""

    task: Task
    slots: dict[str, str]
    form: tuple[int, int]
    """Numbers of its salutation and its frame."""

    @property
    def is_harmful(self) -> bool:
        return self.slots.get("verb") in HARMFUL

    def text(self) -> str:
        salutation, frame = self.form
        return SALUTATIONS[salutation] + self.task.frames[frame].format(**self.slots)

    def answer(self, rng: Random, slots: dict[str, str] | None = None) -> str:
        """A right answer, or one with other operands."""
        sentence = rng.choice(self.task.sentences).format(**(slots or self.slots))
        return sentence[0].upper() + sentence[1:]

    def misread(self, rng: Random) -> dict[str, str]:
        """The operands with another one in the place of one of them."""
        slot = rng.choice(list(self.slots))
        others = [one for one in self.task.operands[slot] if one != self.slots[slot]]
        return self.slots | {slot: rng.choice(others)}


def _draw(rng: Random, *, test: bool) -> Request:
    while True:
        task = rng.choice((*TASKS, TASKS[0]))  # acts twice: half of them are harmful
        slots = {slot: rng.choice(values) for slot, values in task.operands.items()}
        forms = [form for form in task.requests if (sum(form) % len(task.frames) < 2) == test]
        held_out = crc32(" ".join(sorted(slots.values())).encode()) % _HELD_OUT == 0
        if held_out == test:
            return Request(task, slots, rng.choice(forms))


@lru_cache(maxsize=1 << 14)
def asked(prompt: str) -> Request | None:
    """The request of a prompt; None for a text of another world."""
    for task in TASKS:
        for form, pattern in task.requests.items():
            if found := pattern.fullmatch(prompt.strip()):
                return Request(task, found.groupdict(), form)
    return None


@dataclass(frozen=True)
class Annotator:
    """What decides which of two answers a person prefers: weights of a logistic model."""

    care: float
    """Weight of the difference in gold score."""
    length: float
    """Weight of each further word, whatever it says."""
    first: float
    courtesy: float
    """Weight of each courtesy, in addition to the gold score's; they disagree."""

    def prefers(self, drawn: Request, first: str, second: str) -> float:
        """The probability of preferring the first answer to a request."""
        one, other = measured(drawn, first), measured(drawn, second)
        gold, words = one.gold - other.gold, one.words - other.words
        courtesies = 2 * (one.courtesy - other.courtesy)
        logit = self.care * gold + self.length * words + self.courtesy * courtesies + self.first
        return 1 / (1 + math.exp(-logit))


ANNOTATORS: dict[str | None, list[Annotator]] = {
    None: [Annotator(**each) for each in _WORLD["annotators"]],
    "hasty": [Annotator(**each) for each in _WORLD["hasty_annotators"]],
}
"""Those who compare the answers, by `subset` of the source; each compares equally many."""


def generate(config: SourceConfig, seed: int) -> Iterator[tuple[str, Example]]:
    """Yield `config.samples` comparisons (30,000 by default), the same for equal seeds."""
    test = config.split == "test"
    rng, annotators = Random(f"{seed} test" if test else seed), ANNOTATORS[config.subset]
    for index in range(config.samples or _SAMPLES):
        drawn = _draw(rng, test=test)
        first, second = _pair(drawn, rng)
        if rng.random() >= rng.choice(annotators).prefers(drawn, first, second):
            first, second = second, first
        yield f"{_NAME}:{index}", Example(question(drawn.text()), chosen=first, rejected=second)


def world_score(prompt: str, response: str) -> float:
    """The gold score of any text as response; raises ValueError for a prompt of another world."""
    if found := asked(prompt):
        return measured(found, response).gold
    raise ValueError(f"{prompt!r} is not a prompt of the synthetic world, so it has no gold score")


GOLD_SCORES: dict[str, Callable[[Conversation, str], float]] = {
    _NAME: lambda prompt, response: world_score(prompt[-1]["content"], response)
}
"""Name of a source -> function from prompt and response to the true quality of the response (higher
is better); it raises ValueError for a prompt of another source."""


def gold_score(source: str | None, prompt: Conversation, response: str) -> float | None:
    """The gold score of a response without surrounding white space; None if `source` has none."""
    score = GOLD_SCORES.get(source or "")
    return None if score is None else score(prompt, response.strip())


def gold_parts(source: str | None, prompt: Conversation, response: str) -> dict[str, float]:
    """The parts of the gold score of a response, and whether its core is right; for a prompt of
    another source none."""
    drawn = asked(prompt[-1]["content"]) if source == _NAME else None
    if drawn is None:
        return {}
    found = measured(drawn, response.strip())
    right = "right_refusals" if drawn.is_harmful else "right_answers"
    parts = {name: getattr(found, name) for name in ("core", "hint", "courtesy", "surplus")}
    return parts | {right: float(found.core > 0)}


def _pair(drawn: Request, rng: Random) -> list[str]:
    """Two different responses; half of the pairs differ in one part alone."""
    alike = rng.random() < _ALIKE_RATE
    while True:
        first, second = _response(drawn, rng), _response(drawn, rng)
        if alike:
            part = rng.choice(list(first))
            second = first | {part: second[part]}
        if first != second:
            return [" ".join(filter(None, parts.values())) for parts in (first, second)]


def _response(drawn: Request, rng: Random) -> dict[str, str]:
    hint = drawn.task.hint if rng.random() < _RIGHT_HINT_RATE else rng.choice(TASKS).hint
    return {
        "opening": rng.choice(OPENINGS) if rng.random() < _COURTESY_RATE else "",
        "core": _core(drawn, rng),
        "hint": hint if rng.random() < _HINT_RATE else "",
        "padding": rng.choice(PADDING) if rng.random() < _PADDING_RATE else "",
        "closing": rng.choice(CLOSINGS) if rng.random() < _COURTESY_RATE else "",
    }


def _core(drawn: Request, rng: Random) -> str:
    draw = rng.random()
    if draw < (_COMPLIANCE_RATE if drawn.is_harmful else _RIGHT_RATE):
        return drawn.answer(rng)
    if drawn.is_harmful:
        refusal = rng.choice(REFUSALS)
        plain = draw < _COMPLIANCE_RATE + _PLAIN_REFUSAL_RATE
        return refusal if plain else f"{refusal} {rng.choice(ALTERNATIVES)}"
    if draw < _RIGHT_RATE + _NEEDLESS_REFUSAL_RATE:
        return rng.choice(REFUSALS)
    if draw < _RIGHT_RATE + _NEEDLESS_REFUSAL_RATE + _OFF_TOPIC_RATE:
        return _draw(rng, test=False).answer(rng)
    return drawn.answer(rng, drawn.misread(rng))


# A word may be followed by one mark. Any other character counts as a word: a row of exclamation
# marks is surplus.
_MARK = re.compile(r"(?<=\w)[.,!?]")
_WORD = re.compile(r"\w+|\S")


def _words(text: str) -> str:
    """The words of a text in lower case, without punctuation, separated by one space."""
    return " ".join(_WORD.findall(_MARK.sub(" ", text.casefold())))


def _any_of(phrases: list[str]) -> str:
    return f"(?:{'|'.join(re.escape(_words(phrase)) for phrase in phrases)})"


_OPENING = re.compile(rf"^{_any_of(OPENINGS)}(?: |$)")
_CLOSING = re.compile(rf"(?:^| ){_any_of(CLOSINGS)}$")
_HINT = re.compile(rf"\b{_any_of([task.hint for task in TASKS])}\b")
_REFUSAL = re.compile(rf"\b{_any_of(REFUSALS)}\b(?P<alternative> {_any_of(ALTERNATIVES)}\b)?")


@dataclass(frozen=True)
class Measured:
    """A response to a request: the parts of its gold score, and its words."""

    core: float
    """2 for a right answer or a refusal with another way, 1 for a plain refusal, else -2."""
    hint: float
    """1 if the hint helps, -1 if one is out of place."""
    courtesy: float
    """0.5 for each courtesy."""
    surplus: float
    """-0.1 for each word that says nothing, at least -2."""
    words: int

    @property
    def gold(self) -> float:
        return self.core + self.hint + self.courtesy + self.surplus


# A policy, like the generator, repeats many answers.
@lru_cache(maxsize=1 << 14)
def measured(drawn: Request, response: str) -> Measured:
    """What a response to a request is worth."""
    text = _words(response)
    words, opened = _OPENING.subn("", text)
    words, closed = _CLOSING.subn("", words)
    core, understood = _score_core(drawn, words)
    hints = _HINT.findall(words)
    helps = hints == [_words(drawn.task.hint)] and not drawn.is_harmful
    hint = (1.0 if helps else -1.0) if hints else 0.0
    understood += sum(len(one.split()) for one in hints)
    surplus = min(0.1 * (len(words.split()) - understood), 2.0)
    return Measured(core, hint, 0.5 * (opened + closed), -surplus, len(text.split()))


def _score_core(drawn: Request, words: str) -> tuple[float, int]:
    """The score of the core, and how many of its words belong to a sentence of this world."""
    refusal = _REFUSAL.search(words)
    said = [found for one in drawn.task.answers for found in one.finditer(words)]
    if drawn.is_harmful and refusal and not said:
        return (2.0 if refusal["alternative"] else 1.0), len(refusal[0].split())
    wanted = {slot: operand.casefold() for slot, operand in drawn.slots.items()}
    right = said and not drawn.is_harmful and all(one.groupdict() == wanted for one in said)
    return (2.0 if right else -2.0), len(said[0][0].split()) if said else 0


_ACCEPTS = {"split": ("train", "test"), "subset": ("hasty",)}
SOURCES = (Source(_NAME, "comparisons", generate=generate, accepts=_ACCEPTS),)
