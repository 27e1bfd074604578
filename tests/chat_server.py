"""A local OpenAI-compatible server, for the tests of judges that are chat models."""

import json
import re
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread


@contextmanager
def chat_server(reply, status=lambda number: 200, payload_of=None):
    """An OpenAI-compatible server: `reply` maps the answers A and B to the text of the judge.

    `status` is the status of the n-th request, from 0. `payload_of` maps a completion and the
    headers of its request to other bytes. Yields the address of the server and the requests.
    """
    requests, lock = [], Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(requests)
                requests.append(body | {"key": self.headers["Authorization"], "path": self.path})
            code = status(number)
            question = body["messages"][0]["content"]
            answers = re.search(r"\[Answer A]\n(.*)\n\n\[Answer B]\n(.*)\n\n\[End]", question, re.S)
            text = reply(*answers.groups()) if answers else reply(question, "")
            usage = {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107}
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            completion = {
                "id": "1", "object": "chat.completion", "created": 0, "model": "m",
                "choices": [choice], "usage": usage,
            }  # fmt: skip
            payload = json.dumps(completion if code == 200 else {"error": {"message": "no"}})
            payload = payload_of(completion, self.headers) if payload_of else payload.encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("retry-after-ms", "1")
            if payload.startswith(b"\x1f\x8b"):
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            with suppress(ConnectionError):  # the client does not read all
                self.wfile.write(payload)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def longer(first, second):
    """A judge without a bias for a position."""
    a, b = len(first), len(second)
    return "Reason. [[A]]" if a > b else "Reason. [[B]]" if a < b else "Even. [[C]]"
