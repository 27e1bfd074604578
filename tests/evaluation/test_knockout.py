"""The best and the worst of a field, by a judge of pairs."""

import torch

from rlhf_pipeline.evaluation.knockout import knock_out


def played(quality, decide):
    """Points (fields, players), and the matches of each round. Players have numbers in order."""
    rounds, width = [], len(quality[0])

    def recorded(matches):
        rounds.append(list(matches))
        return decide(matches)

    fields = [range(row * width, (row + 1) * width) for row in range(len(quality))]
    points = knock_out(fields, recorded)
    return [[points[player] for player in field] for field in fields], rounds


def by_quality(quality, gain, seed=0):
    """A judge that is asked in both orders; each answer prefers the better one with probability
    sigmoid(gain * difference), and a win needs both."""
    draw, known = torch.Generator().manual_seed(seed), torch.tensor(quality).flatten()

    def decide(matches):
        one, two = torch.tensor(matches).T
        likely = torch.sigmoid(gain * (known[one] - known[two]))
        first, second = (torch.rand(len(matches), generator=draw) < likely for _ in range(2))
        return (first.float() + second.float() - 1).tolist()

    return decide


def test_a_perfect_judge_finds_both_ends_of_a_field_of_any_size():
    draw = torch.Generator().manual_seed(0)
    for size in range(2, 18):
        quality = [torch.randperm(size, generator=draw).tolist() for _ in range(50)]
        points, rounds = played(quality, by_quality(quality, gain=1e3))
        for own, won in zip(quality, points, strict=True):
            assert own[won.index(max(won))] == size - 1
            assert own[won.index(min(won))] == 0
            assert sum(won) == 0
        assert sum(map(len, rounds)) / 50 == (3 * size + 1) // 2 - 2


def test_eight_answers_are_worth_more_than_twice_as_many_comparisons_of_neighbours():
    """Normal qualities. By the judge's comparisons of each answer with the next one alone, the best
    minus the worst would be 1.90, by all 28 comparisons 2.68, and truly it is 2.85."""
    quality = torch.randn(1000, 8, generator=torch.Generator().manual_seed(1))
    points, rounds = played(quality.tolist(), by_quality(quality.tolist(), gain=2.0))
    found, rows = torch.tensor(points), torch.arange(1000)
    gap = quality[rows, found.argmax(1)] - quality[rows, found.argmin(1)]
    assert gap.mean() > 2.4
    assert sum(map(len, rounds)) == 10 * 1000
    assert len(rounds) == 3  # all fields play a round together


def test_after_a_draw_the_player_with_more_points_goes_on():
    """2 beats 3, and all other matches are draws: so 2 goes on after 0 and 2, and after 1 and 3, of
    which 3 has lost, 3 stays for the worst place."""

    def decide(matches):
        return [float(match == (2, 3)) for match in matches]

    points, rounds = played([[0] * 8], decide)
    assert points == [[0.0, 0.0, 1.0, -1.0, 0.0, 0.0, 0.0, 0.0]]
    assert rounds[-1] == [(2, 4), (3, 7)]


def test_single_players_and_empty_fields_have_no_points():
    assert not knock_out([[0], []], lambda matches: [1.0 for _ in matches])
