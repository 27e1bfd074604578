"""A chat model that scores answers by a rubric: a local server answers and fails like real ones."""

import gzip
import json
import re
from collections import Counter
from dataclasses import replace
from threading import Barrier

import pytest
from chat_server import chat_server

from rlhf_pipeline.config.rewards import RubricReward
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.scoring.answers import Answered
from rlhf_pipeline.scoring.chat_model import ChatModel, RubricSource


def answers(*texts):
    prompts = [[{"role": "user", "content": "Say a letter."}]] * len(texts)
    return Answered(prompts, ["a"] * len(texts), list(texts))


def answer_in(question):
    return re.search(r"\[Answer]\n(.*)\n\n\[End]", question, re.S)[1]


def rubric(url, cache, rubric="A long answer is good.", scale=10, **fields):
    chat = {"base_url": url, "model": "org/judge-1"} | fields
    reward = RubricReward(rubric=rubric, openai=chat, scale=scale)
    return RubricSource(reward, ChatModel(reward.openai, cache, "ppo.rewards.0"))


def test_each_answer_is_scored_on_the_scale_and_equal_ones_are_asked_about_once(tmp_path):
    """The three requests run at the same time: each reply waits for the others."""
    together = Barrier(3, timeout=20)

    def reply(question, _):
        together.wait()
        return f"[[{len(answer_in(question))}]]"

    with chat_server(reply) as (url, requests):
        source = rubric(url, tmp_path, scale=4, concurrency=3)
        assert source(None, answers("a", "bbb", "a", "cccc")) == [0.25, 0.75, 0.25, 1.0]
    assert len(requests) == 3
    question = requests[0]["messages"][0]["content"]
    for part in (
        "from 0 to 4.",
        "\nA long answer is good.\n",
        "\nUser: Say a letter.\n",
        "[[2.8]]",
    ):
        assert part in question
    assert source.model.counts == {"calls": 3, "prompt_tokens": 300, "completion_tokens": 21}


def test_a_resumed_step_asks_nothing_twice_unless_a_reply_has_changed(load, scored, rows, tmp_path):
    """The counts are metrics, but no source of rewards."""
    with chat_server(lambda *_: "[[10]]") as (url, requests):
        reward = {"rubric": "Good.", "openai": {"base_url": url, "model": "m"}, "name": "good"}
        first, again = (load(reward)(scored, rows) for _ in range(2))
        assert len(requests) == 3
        file, *_ = sorted(tmp_path.rglob("*.json"))
        whole = file.read_text()
        for damaged in ("[]", whole.replace("[[10]]", "[[3]]"), whole[:20]):
            file.write_text(damaged)
            third = load(reward)(scored, rows)
            assert third.scores.tolist() == [1.0] * 3
    assert first.scores.tolist() == again.scores.tolist() == [1.0] * 3
    assert first.replies == {
        "good/calls": 3, "good/cached": 0, "good/refusals": 0, "good/unparsable": 0,
        "good/prompt_tokens": 300, "good/completion_tokens": 21,
    }  # fmt: skip
    assert (again.replies["good/calls"], again.replies["good/cached"]) == (0, 3)
    assert (third.replies["good/calls"], third.replies["good/cached"]) == (1, 2)
    assert first.parts == again.parts == {}


def test_replies_without_a_score_are_0_and_counted(tmp_path):
    replies = {"a": "I'm sorry, I cannot.", "b": "Well.", "c": "[[11]]", "d": "[[10]] or [[-1]]"}
    replies["e"] = "It quotes [[10]]. [[8]]"  # the last verdict of a reply counts

    with chat_server(lambda question, _: replies.get(answer_in(question), "[[8]]")) as (url, _):
        source = rubric(url, tmp_path)
        given = answers("a", "b", "c", "d", "e", "f", "g", "h")
        assert source(None, given) == pytest.approx([0.0] * 4 + [0.8] * 4)
        counts = Counter(refusals=1, unparsable=3, calls=8)
        assert source.model.counts & Counter(dict.fromkeys(counts, 99)) == counts
        message = r"ppo\.rewards\.0: found 1 of 1 replies of org/judge-1 without a verd"
        with pytest.raises(StageError, match=message):
            source(None, answers("b"))


def test_a_server_that_fails_ends_the_stage_and_keeps_the_replies_so_far(tmp_path):
    down = True
    with chat_server(lambda *_: "[[1]]", lambda n: 401 if down and n >= 2 else 200) as (url, asked):
        source = rubric(url, tmp_path, concurrency=1)
        message = r"ppo\.rewards\.0: org/judge-1 at http.*did not judge.*401.*Fix:"
        with pytest.raises(StageError, match=message):
            source(None, answers("a", "b", "c"))
        down, before = False, len(asked)
        assert source(None, answers("a", "b", "c")) == pytest.approx([0.1] * 3)
        assert len(asked) - before == 1


def test_a_rubric_may_be_the_whole_question_and_read_the_true_answer(tmp_path):
    seen = []

    def reply(question, _):
        seen.append(question)
        return "[[0]]"

    with chat_server(reply) as (url, _):
        source = rubric(url, tmp_path, rubric="{prompt}|{response}|{reference}")
        source(None, answers("{reference} {x}"))
        given = answers("b")
        message = r"ppo\.rewards\.0: found 1 of 1 prompts without a tru"
        with pytest.raises(StageError, match=message):
            source(None, replace(given, references=[None]))
    assert seen == ["User: Say a letter.|{reference} {x}|a"]


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b'{"choices": "' + b" " * 2**20 + b'"}', r"found 1\d{6} plain bytes or more"),
        (gzip.compress(b"0" * 2**24), r"found \d+ gzip bytes or more"),
    ],
    ids=["long", "compressed"],
)
@pytest.mark.parametrize("code", [200, 400])
def test_a_reply_that_would_fill_the_memory_is_refused(tmp_path, body, fault, code):
    with (
        chat_server(lambda *_: "", lambda _: code, lambda *_: body) as (url, asked),
        pytest.raises(StageError, match=rf"^ppo\.rewards\.0: {fault} as a reply of org/judge-1, "),
    ):
        rubric(url, tmp_path)(None, answers("a"))
    assert len(asked) == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [400, 200])
def test_a_server_that_repeats_the_key_does_not_make_it_known(tmp_path, monkeypatch, code):
    monkeypatch.setenv("JUDGE_KEY", "sk-canary-123")

    def body(completion, headers):
        text = f"bad key: {headers['Authorization'].removeprefix('Bearer ')}."
        completion["choices"][0]["message"]["content"] = text
        return json.dumps(completion if code == 200 else {"error": {"message": text}}).encode()

    with (
        chat_server(lambda *_: "", lambda _: code, body) as (url, asked),
        pytest.raises(StageError, match=r"bad key: \.\.\.\.") as error,
    ):
        rubric(url, tmp_path, api_key_env="JUDGE_KEY")(None, answers("a"))
    assert asked[0]["key"] == "Bearer sk-canary-123"
    assert "canary" not in str(error.value)
    assert not [file for file in tmp_path.iterdir() if "canary" in file.read_text()]
