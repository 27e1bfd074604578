"""The best and the worst of several answers to a prompt, by judges that compare two."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.rewards import PairwiseJudge
from rlhf_pipeline.evaluation.comparison import Answer
from rlhf_pipeline.evaluation.judges import outcomes_of
from rlhf_pipeline.rollout.chat_model import ChatModel
from rlhf_pipeline.runtime import heartbeat

Match = tuple[int, int]


def judge_groups(
    drawn: Sequence[Answer], config: EvaluateConfig, cache: Path, *, cut: bool
) -> list[Answer]:
    """Let chat models compare the answers of a policy to the same prompt, on rank 0 alone.

    An answer gets 1 for each win and -1 for each loss, as in `judge_pairs`, which raises the same.
    Answers that were cut play only if `cut` is set.
    """
    playing = [i for i, one in enumerate(drawn) if cut or one.ended]
    fields = [list(own) for _, own in groupby(playing, key=lambda i: drawn[i].row)]
    texts, answers = [(one.prompt, one.response) for one in drawn], list(drawn)
    for judge in config.judges:
        if isinstance(judge, PairwiseJudge):
            model = ChatModel(judge.openai, cache, config.place_of(judge))
            with heartbeat.scored_by(judge.label):
                points = knock_out(fields, partial(_decide, texts, model))
            answers = [
                replace(one, scores=one.scores | {judge.label: points.get(i, 0.0)})
                for i, one in enumerate(answers)
            ]
    return answers


def _decide(
    texts: Sequence[tuple[str, str]], model: ChatModel, matches: Sequence[Match]
) -> list[float]:
    return outcomes_of([(*texts[one], texts[two][1]) for one, two in matches], model)


def knock_out(
    fields: Sequence[Sequence[int]], decide: Callable[[Sequence[Match]], Sequence[float]]
) -> Mapping[int, float]:
    """Wins minus losses of all players; n of a field play about 3n/2 matches.

    `decide` gives 1 for a match that the first player wins, -1 for the second one, 0 for a draw.
    All fields play a round together. The winners of the first one play on for the best place, its
    losers for the worst one. After a draw, the player with more points counts as the winner. One of
    an odd number waits, and plays first in the next round.
    """
    points: dict[int, float] = defaultdict(float)
    # With the places in a pair, better and worse, from which players stay.
    brackets: list[tuple[Sequence[int], tuple[int, ...]]] = [(field, (0, 1)) for field in fields]
    while brackets := [each for each in brackets if len(each[0]) > 1]:
        pairs = [list(zip(field[::2], field[1::2], strict=False)) for field, _ in brackets]
        matches, ranked = [match for own in pairs for match in own], {}
        for (one, two), outcome in zip(matches, decide(matches), strict=True):
            points[one] += outcome
            points[two] -= outcome
            lead = outcome or points[one] - points[two]
            ranked[one, two] = (one, two) if lead >= 0 else (two, one)
        brackets = [
            ([*field[2 * len(own) :], *(ranked[match][place] for match in own)], (place,))
            for (field, places), own in zip(brackets, pairs, strict=True)
            for place in places
        ]
    return points
