"""A chat model as a judge: a local server answers, counts, and fails like real ones do."""

from dataclasses import replace

from chat_server import chat_server, longer

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.evaluation.judges import judge_pairs
from rlhf_pipeline.verdict.answers import Answer
from rlhf_pipeline.verdict.comparison import Standing, compare


def policies(**texts):
    """The answers of policies, by policy; the scores of the reward model are equal."""
    return {
        policy: [
            Answer(row, f"User: {row}?", text, {"score": 0.0}, 0.0, -1.0, 1, True)
            for row, text in enumerate(given)
        ]
        for policy, given in texts.items()
    }


def judge_answers(answers, config, cache):
    """The scores of PPO, and the counts, where the baseline has these answers alone."""
    judged, _, reports = judge_pairs(answers, answers["sft"], config, cache)
    assert {a.scores["chat"] for a in judged["sft"]} == {0.0}
    return [a.scores["chat"] for a in judged["ppo"]], reports["chat"]


def config(url, **fields):
    judge = {"openai": {"base_url": url, "model": "org/judge-1"} | fields, "name": "chat"}
    return EvaluateConfig(judges=[judge])


TEXTS = {"sft": ["a", "bbb", "cc", "same"], "ppo": ["aaa", "b", "dd", "same"]}


def test_both_orders_decide_and_a_repeated_evaluation_asks_nothing(tmp_path):
    """The last verdict of a reply counts: the judge may quote an answer that contains one."""
    with chat_server(lambda a, b: f"It says [[B]]. {longer(a, b)}") as (url, requests):
        scores, counts = judge_answers(policies(**TEXTS), config(url), tmp_path / "cache")
        assert scores == [1.0, -1.0, 0.0, 0.0]
        assert counts == {
            "pairs": 4, "equal": 1, "inconsistent": 0, "refusals": 0, "unparsable": 0,
            "calls": 6, "cached": 0, "prompt_tokens": 600, "completion_tokens": 42,
        }  # fmt: skip
        assert len(requests) == 6
        assert {request["path"] for request in requests} == {"/v1/chat/completions"}
        assert all(r["model"] == "org/judge-1" and r["temperature"] == 0 for r in requests)

        again, counts = judge_answers(policies(**TEXTS), config(url), tmp_path / "cache")
        assert again == scores and len(requests) == 6
        assert (counts["calls"], counts["cached"], counts["prompt_tokens"]) == (0, 6, 0)

        judge_answers(policies(**TEXTS), config(url, model="org/judge-2"), tmp_path / "cache")
        assert len(requests) == 12  # another judge, other requests


def test_a_judge_that_favours_a_position_prefers_nobody(tmp_path):
    """A busy server is asked again."""
    with chat_server(lambda *_: "[[A]]", lambda n: 200 if n else 429) as (url, requests):
        scores, counts = judge_answers(policies(**TEXTS), config(url), tmp_path)
    assert (len(requests), counts["calls"], counts["inconsistent"]) == (7, 6, 3)
    assert scores == [0.0] * 4


def test_refusals_and_replies_without_a_verdict_are_ties_and_counted(tmp_path):
    def reply(first, second):
        if {first, second} == {"a", "aaa"}:
            return "I'm sorry, I cannot compare these." if first == "a" else "Hard to say."
        return longer(first, second)

    with chat_server(reply) as (url, _):
        scores, counts = judge_answers(policies(**TEXTS), config(url), tmp_path)
    assert scores == [0.0, -1.0, 0.0, 0.0]
    assert (counts["refusals"], counts["unparsable"], counts["inconsistent"]) == (1, 1, 0)


def test_an_answer_with_the_name_of_a_field_stays_as_it_is(tmp_path):
    seen = []

    def reply(question, _):
        seen.append(question)
        return "[[C]]"

    with chat_server(reply) as (url, _):
        chat = config(url, template="{prompt}|{first}|{second}")
        judge_answers(policies(sft=["{first} {x}"], ppo=["{second}"]), chat, tmp_path)
    assert sorted(seen) == ["User: 0?|{first} {x}|{second}", "User: 0?|{second}|{first} {x}"]


def test_every_draw_of_a_prompt_meets_the_next_draw_of_the_baseline(tmp_path):
    """Equal draws are not independent: aaa meets bbb, b meets cc, dd meets same, same meets a."""
    answers = {
        name: [replace(a, row=0, draw=a.row) for a in given]
        for name, given in policies(**TEXTS).items()
    }
    with chat_server(longer) as (url, _):
        scores, counts = judge_answers(answers, config(url), tmp_path)
    assert (scores, counts["pairs"]) == ([0.0, -1.0, -1.0, 1.0], 4)


def test_the_answer_meets_a_second_draw_of_the_baseline_if_there_is_one(tmp_path):
    answers = policies(sft=["a", "a"], ppo=["aaa", "aaa"])
    again = ("aaaaa", "a")
    drawn = [
        replace(a, response=text, draw=draw)
        for a, other in zip(answers["sft"], again, strict=True)
        for draw, text in enumerate((a.response, other))
    ]
    with chat_server(longer) as (url, _):
        judged, drawn, _ = judge_pairs(answers, drawn, config(url), tmp_path)
    assert [a.scores["chat"] for a in judged["ppo"]] == [-1.0, 1.0]
    assert [a.scores["chat"] for a in drawn] == [0.0] * 4
    standings = dict.fromkeys(("score", "chat"), Standing("independent"))
    rate = compare(judged, config(url), standings, drawn)["win_rates"]["chat"]
    assert (rate["wins"], rate["losses"], rate["n"]) == (1, 1, 2)
