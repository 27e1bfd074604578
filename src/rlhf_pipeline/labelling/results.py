"""What the votes say: win rates by people, agreement with the judges and among people."""

from collections import Counter
from collections.abc import Sequence

from rlhf_pipeline.evaluation.comparison import judge_title
from rlhf_pipeline.labelling.pairs import Pair
from rlhf_pipeline.labelling.votes import Vote
from rlhf_pipeline.statistics import agreement, rate_interval, win_rate


def results(pairs: Sequence[Pair], votes: Sequence[Vote]) -> list[tuple[str, str]]:
    """The name and the text of each result. Votes on other pairs do not count.

    All votes on a pair count as one, by their mean: intervals need independent pairs.
    """
    given: dict[str, list[Vote]] = {pair.pair: [] for pair in pairs}
    for vote in votes:
        given.get(vote.pair, []).append(vote)
    found: list[tuple[str, str]] = []
    for policies in dict.fromkeys(pair.policies for pair in pairs):
        voted = [pair for pair in pairs if given[pair.pair] and pair.policies == policies]
        gains = [float(sum(v.second_score - v.first_score for v in given[p.pair])) for p in voted]
        if gains:
            rate = win_rate(gains, [0.0] * len(gains))
            text = _share(rate.wins + rate.ties / 2, rate.n, rate.ties)
            counts = f"{rate.wins} wins, {rate.ties} ties, {rate.losses} losses"
            found.append((f"People prefer {policies[1]} to {policies[0]}", f"{text}: {counts}"))
        for judge in voted[0].judges if voted else ():
            signs = [gain * pair.judges[judge] for gain, pair in zip(gains, voted, strict=True)]
            if n := sum(sign != 0 for sign in signs):
                text = f"{_share(sum(sign > 0 for sign in signs), n)} without ties"
                found.append((f"People agree with {judge_title(judge)}", text))
    raw, alpha = agreement([[(v.first_score, v.second_score) for v in g] for g in given.values()])
    if raw is not None:
        chance = "" if alpha is None else f"; Krippendorff's alpha {alpha:.2f}"
        found.append(("Two people agree", f"on {raw:.1%} of the pairs that both compared{chance}"))
    counted = Counter(vote.annotator for group in given.values() for vote in group)
    return found + [(name, f"{count} of {len(pairs)} pairs") for name, count in counted.items()]


def _share(count: float, n: int, ties: int = 0) -> str:
    lower, upper = rate_interval(count / n, n, ties)
    return f"on {count / n:.1%} (95%: {lower:.1%} to {upper:.1%}) of {n} pairs"
