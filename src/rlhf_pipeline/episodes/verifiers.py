"""Episodes in an environment of the library verifiers.

The library plays a rollout itself, and asks a chat server for the turns of the model. Here each
rollout has such a server: it hands requests to the policy, and replies with the policy's answers.
"""

import asyncio
import json
from collections.abc import Mapping
from itertools import islice
from secrets import token_urlsafe
from threading import Thread
from typing import Any

from rlhf_pipeline.episodes.calls import ToolCall, calls_in
from rlhf_pipeline.errors import StageError

try:
    import verifiers.v1 as vf
    from aiohttp import web
except ImportError as error:
    fix = "install verifiers 0.4 with this package's openai (docs/tools.md)"
    raise StageError(f"verifiers: found {error}. Fix: {fix}") from None

Step = tuple[list[dict[str, Any]], float, bool]


class Verifiers:
    """A rollout. The arguments are the library's block `env`: taskset, agent, and so on. The column
    `idx` of a row is the place of its task in the taskset."""

    def __init__(self, environment_arguments: Mapping[str, Any]) -> None:
        self._arguments, self._known = dict(environment_arguments), list[dict[str, Any]]()
        self._requests, self._answers = asyncio.Queue[Any](), asyncio.Queue[str]()
        self._loop = asyncio.new_event_loop()  # runs on between the calls of this class
        Thread(target=self._loop.run_forever, daemon=True).start()

    def reset(self, task: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The messages of the first request, with its tools."""
        self._rollout = asyncio.run_coroutine_threadsafe(self._played(task.get("idx")), self._loop)
        return asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()[0]

    def step(self, answer: str) -> Step:
        """What the next request adds, or the end with the rollout's reward."""
        self._loop.call_soon_threadsafe(self._answers.put_nowait, answer)
        return asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()

    async def _next(self) -> Step:
        request = asyncio.ensure_future(self._requests.get())
        end = asyncio.wrap_future(self._rollout)
        await asyncio.wait([request, end], return_when=asyncio.FIRST_COMPLETED)
        return (request.result(), 0.0, False) if request.done() else ([], end.result(), True)

    async def _played(self, index: Any) -> float:
        environment = vf.load_environment(vf.resolve_env_config(self._arguments))
        tasks = islice(environment.taskset, index, None) if isinstance(index, int) else iter(())
        if (task := next(tasks, None)) is None:
            expected = "a task's place in the taskset. Fix: correct this column of the data"
            raise StageError(f"idx: found {index}, expected {expected}")
        app, secret = web.Application(client_max_size=2**30), token_urlsafe()
        app.router.add_post(f"/{secret}/v1/chat/completions", self._replied)
        await (runner := web.AppRunner(app)).setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/{secret}/v1"
        client = vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY")
        async with environment.serving():
            episode = await environment.run_episode(task, vf.ModelContext("policy", client))
        if not episode.ok:
            errors = [*episode.errors, *(each for one in episode.traces for each in one.errors)]
            said = "; ".join(f"{each.type}: {each.message}" for each in errors)
            raise StageError(f"verifiers: found {said}, expected a rollout. Fix: see what it says")
        return float(sum(one.reward for one in episode.traces if one.agent.trainable))

    async def _replied(self, request: "web.Request") -> "web.Response":
        body = await request.json()
        asked, known = [_plain(message) for message in body["messages"]], self._known
        new = asked[len(known) + bool(known) :]
        if asked[: len(known)] != known or not new:
            fix = "Fix: choose a harness without compaction, and give other agents a client"
            raise web.HTTPBadRequest(text=f"found a second conversation, expected one. {fix}")
        self._known, tools = asked, body.get("tools")
        if tools and not known:
            new[0] = new[0] | {"tools": tools}
        self._requests.put_nowait(new)
        answer = await self._answers.get()
        message: dict[str, Any] = {"role": "assistant", "content": answer}
        found = calls_in(answer, None) if tools else []
        if calls := [one for one in found if isinstance(one, ToolCall)]:
            message["tool_calls"] = [
                {"index": n, "id": f"call{len(asked)}_{n}", "type": "function"}
                | {"function": {"name": one.name, "arguments": json.dumps(one.arguments)}}
                for n, one in enumerate(calls)
            ]
        kind, end = ("delta", ".chunk") if body.get("stream") else ("message", "")
        choice = {"index": 0, kind: message, "finish_reason": "tool_calls" if calls else "stop"}
        reply = {"id": f"turn{len(asked)}", "object": f"chat.completion{end}", "created": 0}
        text = json.dumps(reply | {"model": body["model"], "choices": [choice]})
        if end:
            return web.Response(
                text=f"data: {text}\n\ndata: [DONE]\n\n", content_type="text/event-stream"
            )
        return web.json_response(text=text)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return {"role": message["role"], "content": "".join(parts)}
