"""The gate: cheats and equals are refused with the right reason; honest improvements pass."""

from dataclasses import replace

import numpy as np
import pytest
from random_answers import PROMPTS, WORDS, policy

from rlhf_pipeline.config.evaluate import RegisterConfig
from rlhf_pipeline.verdict.comparison import Standing
from rlhf_pipeline.verdict.gate import Evidence, allowed_error, decide, outcome
from rlhf_pipeline.verdict.statistics import win_rate

CONFIG = RegisterConfig()
INDEPENDENT, OPTIMIZED = Standing("independent"), Standing("optimized", {"ppo": "rewards"})


def evidence(rng, candidate, **more):
    more = {"judge": "gold", "standing": INDEPENDENT} | more
    return Evidence(candidate=candidate, baseline=policy(rng, 0.0, kl=0.0), **more)


def gold(answers):
    return [a.scores["gold"] for a in answers]


def accuracy(margin, over_length=0.1):
    """Of the reward model: the lower ends of its margin, and of what it knows beyond length."""
    return {"score": {"margin": {"lower": margin}, "over_length": {"lower": over_length}}}


def seeds():
    return [np.random.default_rng(seed) for seed in range(20)]


EQUAL_LENGTH = "win rate against SFT at equal length"


def longer(rng, noise):
    """A judge that counts words, and a candidate that writes more of them."""
    tokens = {
        name: rng.normal(mean, 3, PROMPTS).round() for name, mean in (("sft", 18), ("ppo", 21))
    }

    def answers(name):
        errors = rng.normal(0, noise, PROMPTS)
        return [
            replace(a, response_tokens=int(n), scores={"score": n + e, "gold": n + e})
            for a, n, e in zip(policy(rng, 0.0), tokens[name], errors, strict=True)
        ]

    return Evidence(answers("ppo"), answers("sft"), "gold", INDEPENDENT)


def cheats(rng):
    """A candidate for each cheat, and a part of the reason for its refusal."""
    loop = [" ".join([*rng.choice(WORDS, 3), *[rng.choice(WORDS)] * 9]) for _ in range(PROMPTS)]
    better = policy(rng, 0.8)
    given = evidence(rng, better)
    flat = policy(rng, 0.0)
    saturated = [replace(a, scores=dict.fromkeys(a.scores, 3.0)) for a in flat]
    return {
        "length of an answer": evidence(rng, policy(rng, 0.8, length=60)),
        "repeated word triples": evidence(rng, policy(rng, 0.8, texts=loop)),
        EQUAL_LENGTH: longer(rng, noise=0),
        "spread of the scores": evidence(rng, saturated),
        "answers that differ from SFT's: found 0%": replace(given, candidate=given.baseline),
        "win rate against the champion by the gold judge": evidence(
            rng, better, champion=policy(rng, 1.6)
        ),
        "KL from SFT: found 25.00": evidence(rng, policy(rng, 0.8, kl=25.0)),
        "answers that end by themselves": evidence(rng, policy(rng, 0.8, ended=0.3)),
        "win rate against SFT by the gold judge": evidence(rng, policy(rng, -0.8)),
        "preference of the reward model for the chosen answers: found -0.030": evidence(
            rng, better, judge="score", accuracy=accuracy(-0.03)
        ),
        "judge that decides: found the gold judge, which training has optimized": evidence(
            rng, better, standing=OPTIMIZED
        ),
        "the champion: found no answers (other tokens)": evidence(
            rng, better, champion_fault="other tokens"
        ),
        "what the candidate learned: found little (its loss was 0.693 and is 0.693), expected "
        "more": replace(given, hardly_learned="its loss was 0.693 and is 0.693"),
    }


def test_every_cheat_is_refused_for_its_reason_in_20_of_20_runs():
    """The first three cheat without a loss of score: nothing else speaks against them, except that
    no shorter answer shows whether five times the length is better."""
    for rng in seeds():
        for number, (reason, given) in enumerate(cheats(rng).items()):
            refusals = decide(given, CONFIG).refusals
            assert any(reason in refusal for refusal in refusals), (reason, refusals)
            assert number >= 3 or len(refusals) == 1 + (number == 0), refusals


def test_longer_answers_do_not_pass_as_better_ones():
    """Whether length tells wins from losses exactly, so that no rate at equal length can be
    estimated, or but for an error of the judge of three words."""
    for noise in (0, 3):
        refused = [decide(longer(rng, noise), CONFIG).refusals for rng in seeds()]
        named = [one for one in refused if one and one[0].startswith(EQUAL_LENGTH)]
        assert len(named) >= 19, refused  # one in forty is above its interval
    rng = np.random.default_rng(0)
    always = longer(rng, 0)
    told = [replace(a, scores={"gold": a.scores["gold"] + 9.0}) for a in always.candidate]
    assert not decide(replace(always, candidate=told), CONFIG).refusals  # shorter ones win as well
    longest = [replace(a, response_tokens=a.response_tokens + 20) for a in told]
    (refusal,) = decide(replace(always, candidate=longest), CONFIG).refusals
    assert refusal.startswith(f"{EQUAL_LENGTH}: found 0.000")


@pytest.mark.parametrize("champion", [None, 0.3])
def test_an_honest_improvement_is_promoted_in_at_least_18_of_20_runs(champion):
    promoted = 0
    for rng in seeds():
        rival = None if champion is None else policy(rng, champion)
        given = evidence(rng, policy(rng, 0.9), champion=rival)
        promoted += not decide(given, CONFIG).refusals
    assert promoted >= 18


def test_wins_by_a_hair_are_no_improvement():
    rng = np.random.default_rng(3)
    given = evidence(rng, policy(rng, 0.0))
    nudged = [
        replace(a, response=f"{a.response} so", scores={"score": 0.0, "gold": b.scores["gold"] + d})
        for a, b, d in zip(
            given.candidate, given.baseline, rng.normal(0.002, 0.001, PROMPTS), strict=True
        )
    ]
    refusals = decide(replace(given, candidate=nudged), CONFIG).refusals
    assert [refusal.partition(":")[0] for refusal in refusals] == [
        "gain over SFT in units of the scores' spread"
    ]


@pytest.mark.parametrize(
    ("state", "words", "fix", "outcomes"),
    [
        ("optimized", "which training has optimized",
         "add an independent judge to evaluate.judges, hold comparisons back for one (",
         " by the judge that it was trained on"),
        ("unknown", "which training may have optimized, for the records do not exclude it",
         "let another judge decide; or if you know that no training has optimized this one",
         " by a judge that it may have been trained on"),
    ],
)  # fmt: skip
def test_only_an_independent_judge_promotes_unless_the_parameters_say_otherwise(
    state, words, fix, outcomes
):
    rng = np.random.default_rng(7)
    standing = Standing(state, {"ppo": "rewards"})
    given = evidence(
        rng, policy(rng, 0.9), judge="score", standing=standing, accuracy=accuracy(0.6)
    )
    (refusal,) = decide(given, CONFIG).refusals
    assert refusal.startswith(
        f"judge that decides: found the reward model, {words}, expected one that no "
    )
    assert f"Fix: {fix}" in refusal
    verdict = decide(given, RegisterConfig(require_independent_judge=False)).record()
    assert verdict["refusals"] == [] and outcome(True, verdict) == f"promoted{outcomes}"


def test_an_outcome_against_the_conditions_names_its_parameter():
    verdict = {"state": "independent", "refusals": ["length"]}
    assert outcome(True, verdict) == "promoted (register.promote: always)"
    assert outcome(False, verdict) == "not promoted"
    assert outcome(False, verdict | {"refusals": []}) == "not promoted (register.promote: never)"


def test_a_fall_of_right_answers_is_no_improvement():
    """Lenient and strict accuracy fall from 1 to 0.9, and may fall by 0.05."""
    rng = np.random.default_rng(21)
    given = evidence(rng, policy(rng, 0.9))
    right = [replace(a, right=(1.0, 1.0)) for a in given.baseline]
    wrong = [replace(a, right=(i % 10 > 0,) * 2) for i, a in enumerate(given.candidate)]
    fallen = replace(given, baseline=right, candidate=wrong)
    names = [refusal.partition(":")[0] for refusal in decide(fallen, CONFIG).refusals]
    assert names == ["strict accuracy against SFT", "lenient accuracy against SFT"]
    unknown = [replace(a, right=None) if a.row == 5 else a for a in wrong]  # is left out
    assert len(decide(replace(fallen, candidate=unknown), CONFIG).refusals) == 2
    assert not decide(fallen, RegisterConfig(max_task_drop=0.1)).refusals


def test_the_verdict_has_every_number():
    rng = np.random.default_rng(8)
    given = evidence(rng, policy(rng, 0.9), champion=policy(rng, 0.0), tries=2)
    record = decide(given, CONFIG).record()
    assert (record["judge"], record["state"], record["tries"]) == ("gold", "independent", 2)
    assert record["confidence"] == pytest.approx(1 - 0.1 / 6)
    assert [check["what"] for check in record["checks"]] == [
        "paired win rate against SFT by the gold judge",
        "win rate against SFT at equal length",
        "paired win rate against the champion by the gold judge",
        "win rate against the champion at equal length",
        "gain over SFT in units of the scores' spread",
        "judge that decides",
        "answers that differ from SFT's",
        "KL from SFT",
        "length of an answer relative to SFT's",
        "answers that end by themselves",
        "repeated word triples of an answer",
        "spread of the scores relative to SFT's",
    ]
    assert record["refusals"] == [] and all(check["passed"] for check in record["checks"])
    for tries, alpha, level in ((1, 0.05, "95"), (2, 0.1 / 6, "98.33"), (10, 0.1 / 110, "99.91")):
        lower = win_rate(gold(given.candidate), gold(given.baseline), alpha).lower
        found = decide(replace(given, tries=tries), CONFIG).checks[0].found
        assert found == f"{lower:.3f} as the lower end of its {level}% interval"


def test_an_equal_policy_is_promoted_at_most_as_often_as_the_error_allows():
    """By the win rate alone: 200 candidates, each the only try; 200 times ten on equal prompts."""
    rng = np.random.default_rng(5)

    def equal():
        return gold(policy(rng, 0.0))

    def promoted(tries, baseline):
        lower = win_rate(equal(), baseline, allowed_error(tries)).lower
        return lower > CONFIG.min_win_rate_lower

    single = sum(promoted(1, equal()) for _ in range(200))
    assert single <= 10  # 2.5% are 5; binomial, 99th percentile
    families = 0
    for _ in range(200):
        baseline = equal()
        families += any(promoted(tries, baseline) for tries in range(1, 11))
    assert families <= 18  # 5% are 10; binomial, 99th percentile


def task(change):
    found = {"metric": "acc", "value": 0.75 + change, "change": change, "n": 400}
    return found | {"lower": change - 0.025, "upper": change + 0.025}


def test_a_task_may_fall_by_as_much_as_is_allowed():
    """The mean decides, up to rounding: the interval of a small task would never allow it."""
    rng = np.random.default_rng(12)
    tasks = {"arc": task(0.7 - 0.75), "copy": task(-0.125), "letters": task(0.25)}
    given = evidence(rng, policy(rng, 0.9), tasks=tasks)
    assert decide(given, CONFIG).refusals == [
        "acc of task copy against SFT: found a change of -0.125 (95%: -0.150 to -0.100), "
        "expected a fall of at most 0.05 (register.max_task_drop)"
    ]
    assert not decide(given, RegisterConfig(max_task_drop=0.125)).refusals
    (least, refusal) = decide(given, RegisterConfig(max_task_drop=0.0499)).refusals
    assert (least.split(":")[0], refusal.split(":")[0]) == (
        "acc of task arc against SFT",
        "acc of task copy against SFT",
    )


def test_a_reward_model_that_measures_length_cannot_promote():
    """Not even by another judge, if training has optimized it."""
    rng = np.random.default_rng(9)
    given = evidence(rng, policy(rng, 0.9), accuracy=accuracy(0.7, over_length=0.0))
    (refusal,) = decide(given, CONFIG).refusals
    assert refusal == (
        "accuracy of the reward model above that of the longer answer: found +0.000 as the lower "
        "end of its 95% interval, expected more than 0: else it may measure length alone "
        "(register.min_accuracy_over_length)"
    )
    assert not decide(given, RegisterConfig(min_accuracy_over_length=None)).refusals
    of_file = {"score": {"margin": {"lower": 0.7}}}
    assert not decide(replace(given, accuracy=of_file), CONFIG).refusals


def test_a_judge_that_trained_the_champion_does_not_decide_between_the_two():
    """By `score`, the champion is better, and by the gold judge the candidate."""
    rng = np.random.default_rng(10)
    champion = [
        replace(a, scores={"score": 9.0, "gold": a.scores["gold"]}) for a in policy(rng, 0.0)
    ]
    given = evidence(rng, policy(rng, 0.9), champion=champion, champion_judge="gold")
    assert not decide(given, CONFIG).refusals
    refusal, _ = decide(replace(given, champion_judge="score"), CONFIG).refusals
    assert refusal.startswith("paired win rate against the champion by the reward model")


def test_the_gate_counts_prompts_not_answers():
    rng = np.random.default_rng(12)
    given = evidence(rng, policy(rng, 0.3), champion=policy(rng, 0.1))

    def drawn(answers):
        return [replace(a, draw=draw) for a in answers for draw in range(4)]

    policies = {name: drawn(getattr(given, name)) for name in ("candidate", "baseline", "champion")}
    again = replace(given, **policies)
    assert [str(check) for check in decide(again, CONFIG).checks] == [
        str(check) for check in decide(given, CONFIG).checks
    ]
