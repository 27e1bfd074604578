"""The best and the worst of several answers to a prompt, by judges that compare two.

n answers need about 3n/2 comparisons.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.rewards import PairwiseJudge
from rlhf_pipeline.evaluation.comparison import Answer
from rlhf_pipeline.evaluation.judges import TEMPLATE, outcomes_of
from rlhf_pipeline.rollout.chat_model import ChatModel
from rlhf_pipeline.runtime import heartbeat


class Player(NamedTuple):
    """An answer to the prompt of a row."""

    row: int
    draw: int


Match = tuple[Player, Player]


def judge_groups(
    drawn: Sequence[Answer], config: EvaluateConfig, cache: Path, *, cut: bool
) -> list[Answer]:
    """Let chat models compare the answers of a policy to the same prompt, on rank 0 alone.

    An answer gets 1 for each win and -1 for each loss, by both orders as in `judge_pairs`, which
    raises the same. Answers that were cut play only if `cut` is set.
    """
    known = {Player(one.row, one.draw): one for one in drawn}
    playing = [player for player, one in known.items() if cut or one.ended]
    fields = [list(players) for _, players in groupby(playing, key=lambda player: player.row)]
    for judge in config.judges:
        if not isinstance(judge, PairwiseJudge):
            continue
        model = ChatModel(judge.openai, cache, config.place_of(judge))
        template = judge.openai.template or TEMPLATE
        with heartbeat.scored_by(judge.label):
            points = knock_out(fields, partial(_decide, known, model, template))
        known = {
            player: replace(one, scores=one.scores | {judge.label: points[player]})
            for player, one in known.items()
        }
    return [*known.values()]


def _decide(
    known: Mapping[Player, Answer], model: ChatModel, template: str, matches: Sequence[Match]
) -> list[float]:
    pairs = {
        match: (known[match[0]].prompt, *(known[player].response for player in match))
        for match in matches
    }
    outcomes = outcomes_of(pairs, model, template)
    return [outcomes.get(match, 0.0) for match in matches]


def knock_out(
    fields: Iterable[Sequence[Player]], decide: Callable[[Sequence[Match]], Sequence[float]]
) -> Counter[Player]:
    """Wins minus losses of all players; the fields play at once, in rounds.

    `decide` gives 1 for a match that the first player wins, -1 for the second one, 0 for a draw.
    The winners of the first round play on for the best place, its losers for the worst one. After a
    draw, the player with more points counts as the winner. One of an odd number waits, and plays
    first in the next round.
    """
    points: Counter[Player] = Counter()

    def ranked(brackets: Sequence[Sequence[Player]]) -> list[list[Match]]:
        """The pairs of a round by bracket, the better player first."""
        pairs = [list(zip(each[::2], each[1::2], strict=False)) for each in brackets]
        matches = [match for own in pairs for match in own]
        better = {}
        for match, outcome in zip(matches, decide(matches), strict=True):
            one, two = match
            points[one] += outcome
            points[two] -= outcome
            lead = outcome or points[one] - points[two]
            better[match] = match if lead >= 0 else (two, one)
        return [[better[match] for match in own] for own in pairs]

    def remaining(bracket: Sequence[Player], pairs: Sequence[Match], side: int) -> list[Player]:
        return [*bracket[2 * len(pairs) :], *(pair[side] for pair in pairs)]

    first = list(fields)
    # Brackets with the side of a pair that stays: 0, the better player, or 1, the worse one.
    playing = [
        (remaining(bracket, pairs, side), side)
        for bracket, pairs in zip(first, ranked(first), strict=True)
        for side in (0, 1)
    ]
    while playing := [each for each in playing if len(each[0]) > 1]:
        rounds = ranked([bracket for bracket, _ in playing])
        playing = [
            (remaining(bracket, pairs, side), side)
            for (bracket, side), pairs in zip(playing, rounds, strict=True)
        ]
    return points
