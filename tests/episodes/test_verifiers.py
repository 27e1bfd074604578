"""Episodes in environments of verifiers, by the real library."""

import shutil
from pathlib import Path

import pytest

from rlhf_pipeline.episodes.processes import CallError, Server

pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
CODE = {"environment": "rlhf_pipeline.episodes.verifiers:Verifiers"}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Guess 13."},
]
ROW = {"messages": MESSAGES, "reference": None, "idx": 1}


@pytest.fixture
def episode(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)  # the taskset `guessing`
    begun = []

    def begin(timeout_s=60.0, **harness):
        agent = {"harness": harness, "runtime": {"type": "subprocess"}}
        arguments = {"taskset": {"id": "guessing"}, "agent": agent}
        server = Server("grpo", CODE, arguments, timeout_s)
        begun.extend([server.episode((1,)), server])
        return begun[-2]

    yield begin
    for one in begun:
        one.stop() if isinstance(one, Server) else one.close()


@pytest.mark.parametrize("guess, reward", [("13", 0.5), ("12", 0.0)])
def test_a_rollout_has_turns_and_a_reward_at_its_end(episode, guess, reward):
    own = episode(id="guessing")
    assert own.ask("reset", ROW) == MESSAGES
    more = [[{"role": "user", "content": "Say a number."}], 0.0, False]
    assert own.ask("step", "What?") == more and own.ask("step", "Why?") == more
    assert own.ask("step", guess) == [[], reward, True]


def test_tools_of_the_harness_are_described_and_called(episode):
    own = episode(id="guessing", tools=True)
    first, second = own.ask("reset", ROW)
    assert first["tools"][0]["function"]["name"] == "compare" and second == MESSAGES[1]
    call = '<tool_call>{"name": "compare", "arguments": {"value": %d}}</tool_call>'
    found = own.ask("step", f"I compare. {call % 5}{call % 50}")
    texts = ["too small", "not too small"]
    assert found == [[{"role": "tool", "content": text} for text in texts], 0.0, False]
    assert own.ask("step", "13") == [[], 0.5, True]


def test_a_second_conversation_is_refused(episode):
    own = episode(id="guessing", forget=True)
    own.ask("reset", ROW)
    with pytest.raises(CallError, match=r"found a second conversation, expected one\. Fix: "):
        own.ask("step", "What?")


@pytest.mark.parametrize("index", [None, 2])
def test_a_row_without_its_task_is_refused(episode, index):
    with pytest.raises(CallError, match=rf"idx: found {index}, expected a task's place"):
        episode(id="guessing").ask("reset", ROW | {"idx": index})


@pytest.mark.skipif(shutil.which("uv") is None, reason="the harness null needs uv")
def test_the_library_s_own_harness_plays(episode):
    own = episode(timeout_s=500.0, id="null")
    assert own.ask("reset", ROW) == MESSAGES
    assert own.ask("step", "13") == [[], 0.5, True]
