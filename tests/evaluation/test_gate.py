"""The gate: cheats and equals are refused with the right reason; honest improvements pass."""

from dataclasses import replace

import numpy as np
import pytest
from random_answers import PROMPTS, TEXTS, WORDS, policy

from rlhf_pipeline.config.evaluate import RegisterConfig
from rlhf_pipeline.evaluation.gate import Evidence, allowed_error, decide

CONFIG = RegisterConfig()


def evidence(rng, candidate, **more):
    more = {"judge": "gold", "independent": True} | more
    return Evidence(candidate=candidate, baseline=policy(rng, 0.0, kl=0.0), **more)


def seeds():
    return [np.random.default_rng(seed) for seed in range(20)]


def cheats(rng):
    """A candidate for each cheat, and a part of the reason for its refusal."""
    loop = [" ".join([*rng.choice(WORDS, 3), *[rng.choice(WORDS)] * 9]) for _ in range(PROMPTS)]
    phrase = [" ".join(["that is a great question", *rng.choice(WORDS, 7)]) for _ in range(PROMPTS)]
    better = policy(rng, 0.8)
    given = evidence(rng, better)
    flat = policy(rng, 0.0)
    saturated = [replace(a, scores=dict.fromkeys(a.scores, 3.0)) for a in flat]
    return {
        "length of an answer": evidence(rng, policy(rng, 0.8, length=60)),
        "repeated word triples": evidence(rng, policy(rng, 0.8, texts=loop)),
        "answers with the same phrase: found 100.0% with 'that is a great'": evidence(
            rng, policy(rng, 0.8, texts=phrase)
        ),
        "spread of the scores": evidence(rng, saturated),
        "answers that differ from SFT's: found 0%": replace(given, candidate=given.baseline),
        "win rate against the champion by the gold judge": evidence(
            rng, better, champion=policy(rng, 1.6)
        ),
        "KL from SFT: found 25.00": evidence(rng, policy(rng, 0.8, kl=25.0)),
        "answers that end by themselves": evidence(rng, policy(rng, 0.8, ended=0.3)),
        "win rate against SFT by the gold judge": evidence(rng, policy(rng, -0.8)),
        "accuracy of the reward model": evidence(
            rng, better, judge="score", independent=False, reward_model_accuracy=0.47
        ),
        "the champion: found no answers (other tokens)": evidence(
            rng, better, champion_fault="other tokens"
        ),
    }


def test_a_champion_whose_files_are_gone_is_not_to_be_replaced_blindly():
    rng = next(iter(seeds()))
    given = evidence(rng, policy(rng, 0.9), champion_fault="its folder is gone")
    (refusal,) = decide(given, CONFIG).refusals
    assert refusal == (
        "the champion: found no answers (its folder is gone), expected answers to the same "
        "prompts. Fix: make its files readable again, or set register.model to another name to "
        "keep both; register.promote: always replaces it without a comparison"
    )


def test_every_cheat_is_refused_for_its_reason_in_20_of_20_runs():
    """The first three cheat without a loss of score: nothing else speaks against them."""
    for rng in seeds():
        for number, (reason, given) in enumerate(cheats(rng).items()):
            refusals = decide(given, CONFIG).refusals
            assert any(reason in refusal for refusal in refusals), (reason, refusals)
            assert number >= 3 or len(refusals) == 1, refusals


@pytest.mark.parametrize("champion", [None, 0.3])
def test_an_honest_improvement_is_promoted_in_at_least_18_of_20_runs(champion):
    promoted = 0
    for rng in seeds():
        rival = None if champion is None else policy(rng, champion)
        given = evidence(rng, policy(rng, 0.9), champion=rival)
        promoted += not decide(given, CONFIG).refusals
    assert promoted >= 18


def test_wins_by_a_hair_are_no_improvement():
    """Many wins, but the scores hardly differ."""
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


def test_an_equal_policy_is_promoted_at_most_as_often_as_the_error_allows():
    """By the win rate alone: 200 candidates, each the only try; 200 times ten on equal prompts."""
    rng = np.random.default_rng(5)
    short = [" ".join(text.split()[:4]) for text in TEXTS]  # most of the time goes into words

    def equal():
        return policy(rng, 0.0, kl=0.0, texts=short[:PROMPTS])

    def promoted(tries, baseline):
        candidate = policy(rng, 0.0, texts=short[PROMPTS:])
        verdict = decide(Evidence(candidate, baseline, "gold", True, tries=tries), CONFIG)
        return not any("win rate" in refusal for refusal in verdict.refusals)

    single = sum(promoted(1, equal()) for _ in range(200))
    assert single <= 10  # 2.5% are 5; binomial, 99th percentile
    families = 0
    for _ in range(200):
        baseline = equal()
        families += any(promoted(tries, baseline) for tries in range(1, 11))
    assert families <= 18  # 5% are 10; binomial, 99th percentile


def test_the_errors_of_all_tries_sum_to_less_than_5_percent():
    assert allowed_error(1) == pytest.approx(0.05)
    assert sum(allowed_error(tries) / 2 for tries in range(1, 10_000)) < 0.05


def test_an_independent_judge_can_be_required():
    rng = np.random.default_rng(7)
    given = evidence(
        rng, policy(rng, 0.9), judge="score", independent=False, reward_model_accuracy=0.6
    )
    assert not decide(given, CONFIG).refusals
    (refusal,) = decide(given, RegisterConfig(require_independent_judge=True)).refusals
    assert refusal == (
        "judge that decides: found score, which training has optimized, expected a judge that "
        "training has not optimized (register.require_independent_judge)"
    )


def test_the_verdict_has_every_number():
    rng = np.random.default_rng(8)
    given = evidence(rng, policy(rng, 0.9), champion=policy(rng, 0.0), tries=2)
    record = decide(given, CONFIG).record()
    assert (record["judge"], record["independent"], record["tries"]) == ("gold", True, 2)
    assert record["confidence"] == pytest.approx(1 - 0.1 / 6)
    assert [check["what"] for check in record["checks"]] == [
        "paired win rate against SFT by the gold judge",
        "paired win rate against the champion by the gold judge",
        "gain over SFT in units of the scores' spread",
        "answers that differ from SFT's",
        "KL from SFT",
        "length of an answer relative to SFT's",
        "answers that end by themselves",
        "repeated word triples of an answer",
        "answers with the same phrase",
        "spread of the scores relative to SFT's",
    ]
    assert record["refusals"] == [] and all(check["passed"] for check in record["checks"])
    assert record["checks"][0]["found"].endswith("as the lower end of its 98.33% interval")


def task(change):
    found = {"metric": "acc", "value": 0.75 + change, "change": change, "n": 400}
    return found | {"lower": change - 0.025, "upper": change + 0.025}


def test_a_task_may_fall_by_as_much_as_is_allowed():
    """The mean decides, up to rounding: the interval of a small task would never allow it."""
    rng = np.random.default_rng(12)
    tasks = {"arc": task(0.7 - 0.75), "copy": task(-0.125), "letters": task(0.25)}
    given = evidence(rng, policy(rng, 0.9), tasks=tasks)
    assert decide(given, CONFIG).refusals == [
        "acc of task copy against SFT: found 0.625, a change of -0.125 (95%: -0.150 to -0.100), "
        "expected a fall of at most 0.05 (register.max_task_drop)"
    ]
    assert not decide(given, RegisterConfig(max_task_drop=0.125)).refusals
    (least, refusal) = decide(given, RegisterConfig(max_task_drop=0.0499)).refusals
    assert (least.split(":")[0], refusal.split(":")[0]) == (
        "acc of task arc against SFT",
        "acc of task copy against SFT",
    )


def test_a_reward_model_of_unknown_accuracy_cannot_decide():
    rng = np.random.default_rng(9)
    given = evidence(rng, policy(rng, 0.9), judge="score", independent=False)
    (refusal,) = decide(given, CONFIG).refusals
    assert refusal.startswith("accuracy of the reward model, which decides: found no interval")


def test_a_judge_that_trained_the_champion_does_not_decide_between_the_two():
    """By `score`, the champion is better, and by the gold judge the candidate."""
    rng = np.random.default_rng(10)
    champion = [
        replace(a, scores={"score": 9.0, "gold": a.scores["gold"]}) for a in policy(rng, 0.0)
    ]
    given = evidence(rng, policy(rng, 0.9), champion=champion, champion_judge="gold")
    assert not decide(given, CONFIG).refusals
    (refusal,) = decide(replace(given, champion_judge="score"), CONFIG).refusals
    assert refusal.startswith("paired win rate against the champion by the reward model")


def test_one_phrase_everywhere_is_found_although_sft_repeats_itself():
    rng = np.random.default_rng(11)
    common = ["that is a great question"] * (PROMPTS * 3 // 4) + TEXTS[: PROMPTS // 4]
    baseline = policy(rng, 0.0, kl=0.0, texts=common)
    everywhere = policy(rng, 0.9, texts=[f"that is a great answer {i}" for i in range(PROMPTS)])
    (refusal,) = decide(Evidence(everywhere, baseline, "gold", True), CONFIG).refusals
    assert refusal.startswith("answers with the same phrase: found 100.0%")


def test_a_phrase_may_rise_by_a_part_of_what_sft_leaves():
    """SFT: in a quarter of the answers; the candidate: in 70%."""
    rng = np.random.default_rng(13)
    phrase, n = "i hope this helps", PROMPTS
    few = [f"{text} {phrase}" for text in TEXTS[: n // 4]] + TEXTS[n // 4 : n]
    many = [f"{text} {phrase}" for text in TEXTS[: n * 7 // 10]] + TEXTS[n * 7 // 10 : n]
    baseline, candidate = policy(rng, 0.0, kl=0.0, texts=few), policy(rng, 0.9, texts=many)
    given = Evidence(candidate, baseline, "gold", True)
    (refusal,) = decide(given, CONFIG).refusals
    assert "expected at most 47.5%" in refusal
    (refusal,) = decide(given, RegisterConfig(max_phrase_rise=0.59)).refusals
    assert "expected at most 69.2%" in refusal
    assert not decide(given, RegisterConfig(max_phrase_rise=0.61)).refusals


def test_the_gate_counts_prompts_not_answers():
    """The same answers four times are no further evidence."""
    rng = np.random.default_rng(12)
    given = evidence(rng, policy(rng, 0.3), champion=policy(rng, 0.1))

    def drawn(answers):
        return [replace(a, draw=draw) for a in answers for draw in range(4)]

    policies = {name: drawn(getattr(given, name)) for name in ("candidate", "baseline", "champion")}
    again = replace(given, **policies)
    assert [str(check) for check in decide(again, CONFIG).checks] == [
        str(check) for check in decide(given, CONFIG).checks
    ]
