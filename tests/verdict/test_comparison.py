"""The comparison of literal answers: the stored form, any number of judges, and who decides."""

import json
import math
from dataclasses import replace

import pytest
from made_by_hand import sealed

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.evaluation.evaluate import headline
from rlhf_pipeline.verdict.answers import Answer, read_answers, write_answers
from rlhf_pipeline.verdict.comparison import Standing, best_of_n, compare, deciding_judge

CONFIG = EvaluateConfig(sampling={"temperature": 0.7, "max_response_tokens": 8})
STANDINGS = {"score": Standing("optimized", {"ppo": "rewards"})} | dict.fromkeys(
    ("gold", "exact", "words", "facts"), Standing("independent")
)
LOG_2 = math.log(2)


def answer(row, text, score, gold, kl=0.0, ended=True):
    scores = {"score": score, "gold": gold}
    tokens = len(text.split())
    sft_logprob = -tokens * LOG_2 - row  # so the mean per token is not the mean per answer
    messages = [{"role": "user", "content": f"{row}?"}]
    return Answer(
        row, f"User: {row}?", text, scores, kl, sft_logprob, tokens, ended, messages=messages
    )


ANSWERS = {
    "sft": [
        answer(0, "a b", -1.0, 1.0),
        answer(1, "b b", 0.5, -1.0),
        answer(2, "c", 0.25, 2.0, ended=False),
    ],
    "ppo": [
        answer(0, "a c d", 1.0, 1.0, 0.5),
        answer(1, "b", 0.5, 1.0, -0.25),
        answer(2, "c c", 1.25, 2.5, 1.25),
    ],
}


def with_scores(judge, scores):
    """The answers, with the scores of one more judge, by policy."""
    return {
        policy: [
            replace(a, scores=a.scores | {judge: score})
            for a, score in zip(given, scores[policy], strict=True)
        ]
        for policy, given in ANSWERS.items()
    }


def test_the_evaluation_by_hand():
    """Gold: a tie and two wins. PPO scores 1, 0.5 and 1.25: mean 0.9166667, deviation 0.3818813;

    4.3026527 deviations over sqrt(3) are 0.9486458. SFT's perplexity of its own answers is
    2 e^(3 / 5): its mean per token, not per answer.
    """
    found = compare(ANSWERS, CONFIG, STANDINGS, rewards=["trained"])
    assert json.loads(json.dumps(found)) == found
    named = ("candidate", "prompts", "answers_per_prompt", "judge")
    assert [found[name] for name in named] == ["ppo", 3, 1, "gold"]
    assert found["judges"] == {
        "gold": {"state": "independent", "by": {}},
        "score": {"state": "optimized", "by": {"ppo": "rewards"}},
    }
    assert found["decoding"] == {"temperature": 0.7, "max_response_tokens": 8}
    assert found["differing"] == 1.0
    assert found["rewards"] == ["trained"] and found["variants"] == found["slices"] == {}
    sft, ppo = found["policies"]["sft"], found["policies"]["ppo"]
    assert (ppo["score"], ppo["score_lower"]) == pytest.approx((0.9166667, -0.0319791), abs=1e-6)
    assert (ppo["gold_score"], ppo["kl"], ppo["response_tokens"]) == (1.5, 0.5, 2.0)
    assert sft["sft_perplexity"] == pytest.approx(2 * math.exp(3 / 5))
    assert sft["eos_fraction"] == pytest.approx(2 / 3) == 1 - sft["truncated_fraction"]
    assert (sft["distinct_1"], sft["distinct_2"], sft["repetition"]) == (0.6, 1.0, 0.0)
    assert list(found["win_rates"]) == ["gold", "score"]
    gold = found["win_rates"]["gold"]
    assert [gold[name] for name in ("wins", "ties", "losses", "n")] == [2, 1, 0, 3]
    assert gold["rate"] == gold["paired"]["rate"] == pytest.approx(2.5 / 3)
    assert gold["lower"] == pytest.approx(0.3420320, abs=1e-6)
    assert gold["paired"]["p_value"] == 0.5  # 2 / 2^2
    assert gold["paired"]["gain"] == pytest.approx(0.6711561, abs=1e-6)
    assert gold["length_controlled"] is None


def test_a_judge_that_was_asked_for_is_never_dropped():
    answers = with_scores("facts", {"sft": [1.0, None, 0.0], "ppo": [1.0, None, 1.0]})
    config = EvaluateConfig(judges=[{"reference": "exact", "name": "facts"}])
    with pytest.raises(StageError, match=r"found 1 of 3 answers without a score of facts.*Fix:"):
        compare(answers, config, STANDINGS)


def test_gold_is_left_out_where_a_prompt_has_none():
    answers = with_scores("gold", {"sft": [1.0, None, 2.0], "ppo": [1.5, None, 1.0]})
    evaluation = compare(answers, CONFIG, STANDINGS)
    assert evaluation["judge"] == "score" and list(evaluation["judges"]) == ["score"]
    assert list(evaluation["win_rates"]) == ["score"]
    assert "gold_score" not in evaluation["policies"]["ppo"]
    assert not [name for name in headline(evaluation) if "gold" in name]


def test_the_judges_are_in_the_order_of_the_parameters():
    """The first judge that training has not optimized decides, whatever scored first."""
    config = EvaluateConfig(judges=[{"reference": "exact"}, "a.py:words"])
    answers = {
        policy: [
            replace(a, scores={"words": a.row, "exact": 1.0, "score": a.scores["score"]})
            for a in given
        ]
        for policy, given in ANSWERS.items()
    }
    evaluation = compare(answers, config, STANDINGS)
    assert list(evaluation["win_rates"]) == ["exact", "words", "score"]
    assert evaluation["judge"] == "exact"


def from_sources(*sources):
    """The answers, to prompts of these sources."""
    return {
        policy: [replace(a, source=source) for a, source in zip(given, sources, strict=True)]
        for policy, given in ANSWERS.items()
    }


def test_the_win_rates_of_each_source():
    evaluation = compare(from_sources("web", "books", "web"), CONFIG, STANDINGS)
    assert list(evaluation["slices"]) == ["books", "web"]
    web = evaluation["slices"]["web"]
    assert web["n"] == 2 and list(web["win_rates"]) == ["gold", "score"]
    gold = web["win_rates"]["gold"]  # row 0 is a tie, row 2 a win
    assert (gold["rate"], gold["n"], gold.keys()) == (0.75, 2, {"rate", "lower", "upper", "n"})
    assert evaluation["slices"]["books"]["win_rates"]["score"]["rate"] == 0.5
    assert compare(from_sources("web", "web", "web"), CONFIG, STANDINGS)["slices"] == {}


def test_the_length_controlled_rate_uses_the_tokens_of_both_policies():
    """The longer answer wins on 8 of 10 prompts, the shorter one on 4 of 10: see the statistics."""
    scores = [1.0] * 8 + [0.0] * 2 + [1.0] * 4 + [0.0] * 6
    sft = [replace(answer(row, "a b c d", 0.5, None), response_tokens=4) for row in range(20)]
    ppo = [
        replace(a, scores={"score": score, "gold": None}, response_tokens=7 if a.row < 10 else 1)
        for a, score in zip(sft, scores, strict=True)
    ]
    evaluation = compare({"sft": sft, "ppo": ppo}, CONFIG, STANDINGS)
    controlled = evaluation["win_rates"]["score"]["length_controlled"]
    assert list(controlled) == ["rate", "lower", "upper"]
    assert controlled["rate"] == pytest.approx(0.6202041, rel=1e-6)
    metrics = headline(evaluation)
    assert metrics["length_controlled/score_lower"] == controlled["lower"]
    assert metrics["p_value/score"] == pytest.approx(0.5034447, rel=1e-6)


@pytest.mark.parametrize(
    ("judges", "expected"),
    [
        ("score=optimized", "score"),
        ("score=optimized gold", "gold"),
        ("words score=optimized", "words"),
        ("words score", "words"),  # PPO ran without the reward model
        ("words=optimized facts score=optimized", "facts"),
        ("words=optimized facts=optimized score", "words"),
        ("words=optimized facts=unknown score", "facts"),
        ("words=unknown judge_model score=optimized", "judge_model"),
        ("words judge_model score=optimized", "words"),
    ],
)
def test_gold_decides_and_else_the_first_judge_that_is_independent(judges, expected):
    pairs = (judge.partition("=") for judge in judges.split())
    standings = {name: Standing(state or "independent") for name, _, state in pairs}
    assert deciding_judge(standings) == expected


def twice(answers):
    """Each answer, and the same again as a second draw."""
    return [replace(a, draw=draw) for a in answers for draw in range(2)]


def test_prompts_are_counted_not_answers():
    """The same answers twice: every number but the diversity and the gain's unit stays."""
    answers = from_sources("web", "books", "web")
    once = compare(answers, CONFIG, STANDINGS)
    again = compare({name: twice(given) for name, given in answers.items()}, CONFIG, STANDINGS)
    assert (again["prompts"], again["answers_per_prompt"]) == (3, 2)
    assert again["slices"] == once["slices"] and again["slices"]["web"]["n"] == 2
    assert again["smallest_visible_win_rate"] == once["smallest_visible_win_rate"]
    for judge, rate in once["win_rates"].items():
        found = again["win_rates"][judge]
        for name in ("rate", "lower", "upper", "wins", "ties", "losses", "n"):
            assert found[name] == found["paired"][name] == rate[name]
        assert found["paired"]["p_value"] == rate["paired"]["p_value"]
    for policy, metrics in once["policies"].items():
        for name in ("score_lower", "gold_score_upper", "kl", "kl_lower", "response_tokens"):
            assert again["policies"][policy][name] == pytest.approx(metrics[name])


def test_the_win_rate_is_that_of_independent_draws():
    """With equal draws three wins; against the baseline's second draws a loss, a tie and a win."""
    sft, ppo = (
        [replace(answer(row, "a", 0.0, gold), draw=0) for row in range(3)] for gold in (0.0, 1.0)
    )
    again = [replace(a, draw=1, scores={"score": 0.0, "gold": 2.0 - a.row}) for a in sft]
    drawn = [a for both in zip(sft, again, strict=True) for a in both]
    evaluation = compare({"sft": sft, "ppo": ppo}, CONFIG, STANDINGS, drawn)
    rate = evaluation["win_rates"]["gold"]
    assert (rate["rate"], rate["wins"], rate["ties"], rate["losses"]) == (0.5, 1, 1, 1)
    assert (rate["paired"]["rate"], rate["paired"]["wins"]) == (1.0, 3)
    assert rate["paired"]["p_value"] == 0.25  # 2 / 2^3
    metrics = headline(evaluation)
    assert (metrics["win_rate/gold"], metrics["paired_win_rate/gold"]) == (0.5, 1.0)
    assert metrics["p_value/gold"] == 0.25


def test_accuracies_and_pass_at_k_where_answers_can_be_checked():
    """Two answers to each of three prompts: facts has 1 of 2, 0 of 2 and 2 of 2 right."""
    right = {"sft": [0, 0, 0, 0, 0, 0], "ppo": [1, 0, 0, 0, 1, 1]}
    answers = {
        policy: [
            replace(ANSWERS[policy][n // 2], draw=n % 2, scores={"facts": float(score)},
                    right=(0.0, float(score)))
            for n, score in enumerate(scores)
        ]
        for policy, scores in right.items()
    }  # fmt: skip
    config = EvaluateConfig(judges=[{"reference": "contains", "name": "facts"}])
    found = compare(answers, config, STANDINGS)["policies"]["ppo"]
    names = ("strict_accuracy", "lenient_accuracy", "facts_score", "facts_pass_at_2")
    assert [found[name] for name in names] == [0, 0.5, 0.5, pytest.approx(2 / 3)]
    # At most 1 of 3 without a right one: the exact interval of 2 in 3 mirrors that of 1 in 3.
    assert found["facts_pass_at_2_lower"] == pytest.approx(0.0942993, rel=1e-5)
    assert "lenient_accuracy" not in compare(answers, CONFIG, STANDINGS)["policies"]["ppo"]


def test_the_majority_decides_by_final_answers_and_of_equally_many_the_first():
    """Of PPO's three draws to the first prompt, two find 7; to the second, all differ."""
    said = {
        "sft": [["5", "7", "8"], ["3", "4", "The answer is 4."]],
        "ppo": [["5", "7", "The answer is 7."], ["Answer: 3", "4", "5"]],
    }
    right = [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    answers = {
        policy: [
            replace(ANSWERS["ppo"][row], response=texts[row][n], draw=n, scores={"facts": 0.0},
                    right=(right[row][n], 0.0))
            for row in range(2) for n in range(3)
        ]
        for policy, texts in said.items()
    }  # fmt: skip
    config = EvaluateConfig(judges=[{"reference": "exact", "name": "facts"}])
    found = compare(answers, config, STANDINGS)
    assert [policy["majority_at_3"] for policy in found["policies"].values()] == [0.0, 1.0]
    assert [policy["strict_accuracy"] for policy in found["policies"].values()] == [0.5, 0.5]
    changes = {name: change["change"] for name, change in found["changes"].items()}
    assert changes == {"strict_accuracy": 0.0, "lenient_accuracy": 0.0, "majority_at_3": 1.0}
    assert compare(ANSWERS, CONFIG, STANDINGS)["changes"] == {}


def test_stored_answers_are_read_again_and_those_of_an_earlier_version_are_draw_0(tmp_path):
    write_answers(ANSWERS, tmp_path)
    assert read_answers(sealed(tmp_path)) == ANSWERS
    file = tmp_path / "answers.jsonl"
    file.write_text(file.read_text().replace(', "draw": 0', ""))
    assert read_answers(sealed(tmp_path)) == ANSWERS


def test_the_best_of_n_by_the_reward_model():
    """Two prompts, four draws. The reward model chooses, and its choice has a low gold score."""
    score = [(0.0, 1.0), (2.0, 0.0), (1.0, 3.0), (9.0, -1.0)]
    draws = [
        [answer(0, "a", first, -first), answer(1, "b", second, -second)] for first, second in score
    ]
    curve = best_of_n(draws)
    assert [point["n"] for point in curve] == [1, 2, 4]
    assert [point["score"] for point in curve] == [0.5, 1.5, 6.0]
    assert [point["gold_score"] for point in curve] == [-0.5, -1.5, -6.0]
    # log 2 - 1/2 = 0.1931472, log 4 - 3/4 = 0.6362944
    assert [point["kl"] for point in curve] == pytest.approx([0.0, 0.1931472, 0.6362944], rel=1e-6)
    low, high = (curve[1][f"score_{end}"] for end in ("lower", "upper"))
    assert low < 1.5 < high
    assert [point["n"] for point in best_of_n(draws[:2])] == [1, 2]


def test_without_a_reward_model_the_first_judge_chooses_the_best_of_n():
    draws = [
        [replace(answer(n, "a", 0, None), scores={"gold": gold, "words": words}) for n in range(2)]
        for gold, words in [(3.0, 0.0), (1.0, 2.0)]
    ]
    curve = best_of_n(draws)
    assert [point["words_score"] for point in curve] == [0.0, 2.0]
    assert [point["gold_score"] for point in curve] == [3.0, 1.0]
    assert "score" not in curve[0]
    only_pairs = [[replace(answer(0, "a", 0, None), scores={"gold": None})]]
    with pytest.raises(StageError, match=r"evaluate\.best_of_n: found no judge"):
        best_of_n(only_pairs)
