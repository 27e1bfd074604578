"""The server, by OpenAI's own client over real HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest
from ports import reserved_port

from rlhf_pipeline.inference.policy import Answer, Policy, write

SOURCE = Path(__file__).parents[2] / "src"
LIMIT = 100
"""Tokens of an answer, at most."""


class Server:
    """The program in a process of its own."""

    def __init__(self, folder, port, **changes):
        options = {
            "folder": str(folder),
            "name": "champion",
            "host": "127.0.0.1",
            "port": port,
            "batch_size": 8,
            "max_tokens": LIMIT,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlhf_pipeline.inference.server",
             json.dumps(options | changes)],
            env=os.environ | {"PYTHONPATH": str(SOURCE)},
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{port}/v1"
        self.greeting = self.process.stdout.readline()
        self.client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=600)

    def ask(self, text="hi", **settings):
        """One chat completion, greedy unless said otherwise."""
        settings = {"temperature": 0, "max_tokens": 12} | settings
        return self.client.chat.completions.create(
            model="champion", messages=[{"role": "user", "content": text}], **settings
        )

    def end(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def server(published):
    with reserved_port() as port:
        server = Server(published, port)
        yield server
        server.end()


@pytest.fixture(scope="module")
def greedy(published):
    """The greedy answer to a text, one at a time."""
    policy = Policy.load(published)

    def greedy(text, count=12):
        prompt = policy.chat_prompt([{"role": "user", "content": text}])
        answer = Answer(policy, prompt, count, temperature=0.0, opening=policy.opening)
        for _ in write([answer]):
            pass
        return answer

    return greedy


def test_it_says_where_it_answers_and_what(server):
    assert server.greeting == f"champion answers at {server.url}; Ctrl-C ends it\n"
    assert [model.id for model in server.client.models.list()] == ["champion"]


def test_a_chat_completion(server, greedy):
    answer, expected = server.ask("what is snow?"), greedy("what is snow?")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == expected.finish
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        len(expected.prompt),
        len(expected.ids),
    )
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_streaming_says_the_same(server):
    whole = server.ask("what is snow?").choices[0]
    chunks = [chunk.choices[0] for chunk in server.ask("what is snow?", stream=True)]
    assert "".join(chunk.delta.content for chunk in chunks) == whole.message.content
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert len(chunks) > 3 and chunks[-1].finish_reason == whole.finish_reason


def test_a_completion_continues_the_text(server, greedy):
    prompt = "\n\nHuman: what is snow?\n\nAssistant:"
    settings = {"model": "champion", "prompt": prompt, "temperature": 0, "max_tokens": 12}
    whole = server.client.completions.create(**settings).choices[0]
    assert whole.text.removeprefix(" ") == greedy("what is snow?").text
    chunks = server.client.completions.create(**settings, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text


def test_a_hundred_clients_at_once_get_their_own_answers(server, greedy):
    texts = [f"{'snow ' * (number % 5)}{number}?" for number in range(100)]
    with ThreadPoolExecutor(100) as clients:
        found = list(clients.map(lambda text: server.ask(text).choices[0].message.content, texts))
    assert found == [greedy(text).text for text in texts]


def test_a_seed_repeats_an_answer_also_among_others(server):
    def ask(seed):
        return server.ask(seed=seed, temperature=1.0, top_p=0.95).choices[0].message.content

    alone = [ask(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as clients:
        assert list(clients.map(ask, range(6))) == alone
    assert len(set(alone)) == 6


def test_a_stop_text_ends_the_answer(server):
    whole = server.ask().choices[0].message.content
    stop = whole[4:6]
    found = server.ask(stop=stop).choices[0]
    assert found.message.content == whole[: whole.index(stop)]
    assert found.finish_reason == "stop"


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"n": 2}, "n", "n: found 2. Input should be 1"),
        ({"logprobs": True}, "logprobs", "logprobs: this server does not support it"),
        ({"temperature": 2.5}, "temperature", "found 2.5. Input should be less than or equal to 2"),
        ({"top_p": 0}, "top_p", "found 0. Input should be greater than 0"),
        ({"max_tokens": 0}, "max_tokens", "found 0"),
        ({"max_tokens": LIMIT + 1}, "max_tokens", "found 101, expected at most 100"),
        ({"stop": [""]}, "stop.0", "should have at least 1"),
        ({"text": "<|end|>"}, "messages", "found the control token <|end|>"),
        # "x " is two tokens, and the template adds some.
        ({"text": "x " * 64}, "messages", "expected at most 128 together"),
        ({"text": "x " * 40, "max_tokens": 60}, "max_tokens", "up to 60, expected at most 128"),
    ],
)
def test_a_bad_request_names_the_field(server, settings, field, message):
    with pytest.raises(openai.BadRequestError) as error:
        server.ask(**settings)
    assert error.value.param == field
    assert message in error.value.body["message"]


def post(server, body, content_type="application/json", host=None):
    """The status and the error of a request that no client would send."""
    request = urllib.request.Request(f"{server.url}/chat/completions", body)
    request.add_header("Content-Type", content_type)
    if host:
        request.add_header("Host", host)
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b'{"model": "champion"', 400, "JSON decode error"),
        (b"[]", 400, "valid dictionary"),
        (b'{"model": "champion", "messages": []}', 400, "messages: found []"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}], "model": "champion"}', 400,
         "surrogates not allowed"),
        (b'{"messages": [{"role": "assistant", "content": "a"}], "model": "champion"}', 400,
         "found a last turn that is not the user's"),
        (b'{"messages": [{"role": "user", "content": "a"}], "model": "other"}', 404,
         "model: found 'other', expected 'champion'"),
        (b'{"messages": [{"role": "user", "content": "a"}], "model": "champion", "x": 1}', 400,
         "x: this server does not support it"),
    ],
    ids=["half", "list", "no message", "surrogate", "assistant", "model", "field"],
)  # fmt: skip
def test_nonsense_is_refused(server, body, status, reason):
    found, answer = post(server, body)
    assert found == status
    assert reason in answer


def test_a_large_request_is_refused_by_its_head(server):
    """The server closes the connection, so a client that sends the body may not read the answer."""
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=600)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(2**20 + 1))
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 413
    assert json.load(response)["error"] == {
        "message": "body: found 1048577 bytes, expected at most 1048576",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    connection.close()


def test_a_large_request_of_unknown_length_is_refused_once_it_is_too_large(server):
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=600)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    connection.send(b"100001\r\n" + b" " * (2**20 + 1) + b"\r\n")  # and no end
    response = connection.getresponse()
    assert response.status == 413
    assert json.load(response)["error"]["message"] == "Content Too Large"
    connection.close()


def test_null_is_the_default_and_the_context_limits_an_answer_without_a_limit(server):
    text = "x " * 40  # fewer than 48 of 128 tokens are left
    body = {"model": "champion", "messages": [{"role": "user", "content": text}], "seed": 5}
    nothing = {"max_tokens": None, "stop": None, "n": None, "temperature": None, "stream": None}
    status, answer = post(server, json.dumps(body | nothing).encode())
    usage = json.loads(answer)["usage"]
    assert status == 200 and usage["total_tokens"] <= 128


def test_a_page_under_another_name_cannot_reach_it(server):
    body = b'{"messages": [{"role": "user", "content": "a"}], "model": "champion"}'
    assert post(server, body, host="attacker.example")[0] == 400


def test_a_client_that_leaves_ends_its_answer_and_not_the_server(make_model):
    # A model without positions would write a million tokens, and the next client would wait.
    with reserved_port() as port:
        server = Server(make_model("bloom"), port, max_tokens=10**6)
        try:
            for stream in (True, False):
                asked = {"model": "champion", "stream": stream, "seed": 1}
                asked["messages"] = [{"role": "user", "content": "hi"}]
                body = json.dumps(asked).encode()
                head = (
                    "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                    f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n\r\n"
                ).encode()
                with socket.create_connection(("127.0.0.1", port)) as client:
                    client.sendall(head + body)
                    if stream:
                        assert client.recv(20).startswith(b"HTTP/1.1 200")
                with socket.create_connection(("127.0.0.1", port)) as client:
                    client.sendall(head + body[:9])
                assert server.ask().usage.completion_tokens > 0
        finally:
            server.end()


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, -15)])
def test_a_signal_ends_it_after_the_answers(published, ending, code):
    with reserved_port() as port:
        server = Server(published, port, max_tokens=110)
        stream = server.ask(max_tokens=100, stream=True, seed=1, temperature=1.0)
        first = next(iter(stream))
        server.process.send_signal(ending)
        rest = list(stream)
        assert first.choices[0].finish_reason is None
        assert rest[-1].choices[0].finish_reason in ("stop", "length")
        assert server.process.wait() == code


def test_it_imports_no_training_and_no_tracking():
    code = (
        "import sys, rlhf_pipeline.inference.server\n"
        "unwanted = {'mlflow', 'kedro', 'deepspeed', 'peft', 'datasets', 'pyarrow'}\n"
        "print(sorted(unwanted & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout == "[]\n"
