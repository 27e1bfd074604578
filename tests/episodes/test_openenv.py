"""Episodes on a real server of OpenEnv."""

import subprocess
import sys
import urllib.request
from contextlib import suppress
from socket import socket
from time import monotonic, sleep

import pytest

from rlhf_pipeline.episodes.processes import Server
from rlhf_pipeline.errors import ConfigError

pytest.importorskip("openenv.core", reason="openenv-core is not installed")
CODE = {"environment": "rlhf_pipeline.episodes.openenv:OpenEnv"}
ACTION = {"message": "{answer}", "language": "de"}
SERVER = """
import sys, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    message: str
    language: str = "en"

class Hint(Observation):
    text: str
    left: int

class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, most=9):
        self.number, self.left = most, 2
        return Hint(text=f"0 to {most}, seed {seed}", left=self.left)

    def step(self, action, timeout_s=None):
        self.left -= 1
        right = action.message == str(self.number)
        text = f'{action.language}: {action.message} is {"right" if right else "wrong"}'
        reward = float(right) if right or not self.left else None
        return Hint(text=text, left=self.left, reward=reward, done=right or not self.left)

    @property
    def state(self):
        return State()

app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=3)
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""
ROW = {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Guess."}]}


@pytest.fixture(scope="module")
def url():
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, "-c", SERVER, str(port)]) as process:
        end = monotonic() + 120
        while process.poll() is None and monotonic() < end:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                break
            sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        process.terminate()


@pytest.fixture
def begin(url):
    from rlhf_pipeline.episodes.openenv import OpenEnv

    return lambda seed=1, **arguments: OpenEnv(seed, {"base_url": url} | arguments)


def said(text):
    return [{"role": "user", "content": text}]


def test_the_process_of_an_episode_plays_it(url):
    arguments = {"base_url": url, "observation": "text", "action": ACTION, "columns": ["seed"]}
    server = Server("grpo", CODE, arguments, 60.0)
    own = server.episode((1,))
    try:
        prompt = own.ask("reset", ROW | {"seed": 3})
        assert prompt == [ROW["messages"][0], *said("Guess.\n\n0 to 9, seed 3")]
        odd = '"5"\n{x} \\'
        assert own.ask("step", odd) == [said(f"de: {odd} is wrong"), 0.0, False]
        assert own.ask("step", "9") == [said("de: 9 is right"), 1.0, True]
    finally:
        own.close()
        server.stop()


def test_without_a_field_the_reply_is_json(begin):
    own = begin(seed=2**31 + 4)
    text = '{"text": "0 to 9, seed 4", "left": 2}'
    assert own.reset(ROW)[-1:] == said(f"Guess.\n\n{text}")
    assert own.step("no") == (said('{"text": "en: no is wrong", "left": 1}'), 0.0, False)
    assert own.step("no")[1:] == (0.0, True)


def test_an_observation_after_a_system_message_is_a_turn(begin):
    row = {"messages": ROW["messages"][:1], "most": 0}
    own = begin(observation="text", columns=["most"])
    assert own.reset(row) == [*row["messages"], *said("0 to 0, seed 1")]
    assert own.step("0")[1:] == (1.0, True)


def test_the_end_of_an_episode_frees_its_session(begin):
    for _ in range(6):  # the server has three
        own = begin()
        own.reset(ROW)
        assert [own.step("no")[2] for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ({"observation": "words"}, r"observation: found words, expected one of text, left\. Fix"),
        ({"columns": ["level"]}, r"columns: found level, expected one of messages\. Fix"),
        ({"actions": {}}, r"environment_arguments: found .*'actions', expected base_url.* Fix"),
    ],
)
def test_wrong_arguments_are_refused(begin, arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        begin(**arguments).reset(ROW)


def test_a_server_that_is_not_there_is_named(begin):
    with pytest.raises(ConnectionError, match=r"Failed to connect to ws://127.0.0.1:9/ws"):
        begin(base_url="http://127.0.0.1:9").reset(ROW)
