"""What the votes say, by hand."""

from rlhf_pipeline.data.records import Message
from rlhf_pipeline.labelling.server import results
from rlhf_pipeline.labelling.votes import Pair, Vote

SCORES = {"second": (0, 1), "first": (1, 0), "tie": (1, 1), "bad": (0, 0)}


def pair(number, policies=("sft", "ppo"), **judges):
    prompt = (Message("user", str(number)),)
    name = f"pair {number}"
    return Pair(pair=name, prompt=prompt, first="a", second="b", policies=policies, judges=judges)


def vote(number, annotator, choice):
    first, second = SCORES[choice]
    fields = {"reason": "", "shown_as_a": "first", "time": "", "annotator": annotator}
    return Vote(**dict(pair(number)), first_score=first, second_score=second, **fields)


def test_without_votes_there_is_nothing_to_show():
    assert results([pair(0)], []) == []
    assert results([pair(0)], [vote(7, "Ann", "first")]) == []  # on the pairs of another evaluation


def test_a_pair_counts_once_by_the_mean_of_its_votes():
    """Pair 0 is a win by two votes to one, 1 a loss, 2 a tie of opposite votes, 3 of both bad."""
    pairs = [pair(number) for number in range(5)]
    votes = [
        *(vote(0, name, choice) for name, choice in
          [("Ann", "second"), ("Bob", "second"), ("Eve", "first")]),
        vote(1, "Ann", "first"),
        vote(2, "Ann", "first"),
        vote(2, "Bob", "second"),
        vote(3, "Ann", "bad"),
    ]  # fmt: skip
    found = dict(results(pairs, votes))
    # (1 + 2 / 2) / 4; Wilson's interval with ties: z^2 = 3.8415, variance = .25 - 2 / 16 = .125
    # centre (.5 + .48018) / 1.96037 = .5, half width sqrt(3.8415 (.03125 + .060023)) / 1.96037
    assert found["People prefer ppo to sft"] == (
        "on 50.0% (95%: 19.8% to 80.2%) of 4 pairs: wins 1, ties 2, losses 1"
    )
    assert (found["Ann"], found["Bob"]) == ("4 of 5 pairs", "2 of 5 pairs")


def test_policies_that_a_file_names_are_compared_separately():
    pairs = [pair(0), pair(1, ("old", "new")), pair(2, ("old", "new"))]
    found = dict(results(pairs, [vote(0, "Ann", "first"), vote(1, "Ann", "second")]))
    assert found["People prefer ppo to sft"].startswith("on 0.0% ")
    assert found["People prefer new to old"].endswith(" of 1 pairs: wins 1, ties 0, losses 0")


def test_agreement_with_a_judge_counts_pairs_on_which_both_have_a_preference():
    gains = [1.0, -1.0, 2.0, 0.0, 3.0]  # the people: second, second, second, second, tie
    pairs = [pair(number, score=gain, gold=0.0) for number, gain in enumerate(gains)]
    votes = [vote(number, "Ann", "second") for number in range(4)] + [vote(4, "Ann", "tie")]
    found = dict(results(pairs, votes))
    assert found["People agree with the reward model"].startswith("on 66.7% (95%: ")
    assert found["People agree with the reward model"].endswith(" of 3 pairs without ties")
    assert "People agree with the gold judge" not in found


def test_agreement_of_people():
    """Two pairs with two equal votes, one with unequal ones; one vote alone says nothing."""
    choices = ["second second", "first first", "second tie", "first"]
    votes = [
        vote(number, name, choice)
        for number, given in enumerate(choices)
        for name, choice in zip(("Ann", "Bob"), given.split(), strict=False)
    ]
    found = dict(results([pair(number) for number in range(4)], votes))
    assert found["Two people agree"] == "on 66.7% of the pairs that both compared"
