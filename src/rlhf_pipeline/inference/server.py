"""Program: serve a policy by the part of OpenAI's HTTP interface that clients need to talk to it.

`python -m rlhf_pipeline.inference.server OPTIONS`, the arguments of `main` as JSON.
"""

import json
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path
from random import Random
from textwrap import shorten
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.inference.batching import Batcher
from rlhf_pipeline.inference.policy import Answer, Policy, explained

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_BODY = 2**20
"""Bytes of a request, at most."""
GRACE_S = 5
"""Time that answers have to finish after Ctrl-C."""


def _text(value: str) -> str:
    value.encode()  # raises for half a surrogate pair, which JSON can contain and no text can
    return value


Text = Annotated[str, AfterValidator(_text)]
Stop = Annotated[
    list[Annotated[Text, Field(min_length=1)]],
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    Field(max_length=4),
]
NAMES = AliasChoices("max_tokens", "max_completion_tokens")


class Asked(BaseModel):
    """What all requests have. Null means the default, as for OpenAI."""

    model_config = ConfigDict(extra="forbid")

    model: str
    max_tokens: int | None = Field(None, ge=1, validation_alias=NAMES)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: Stop | None = None
    seed: int | None = None
    n: Literal[1] | None = None
    stream: bool | None = None


class Completion(Asked):
    """A request for the text that follows another one."""

    prompt: Text = Field(min_length=1)


class Message(BaseModel):
    """One turn of a dialogue."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: Text


class Chat(Asked):
    """A request for the next turn of a dialogue."""

    messages: list[Message] = Field(min_length=1)


def application(
    policy: Policy, name: str, *, batch_size: int, max_tokens: int, host: str = LOOPBACK[0]
) -> FastAPI:
    """The server of one policy; see `main`."""
    app = FastAPI(title="rlhf-pipeline", docs_url=None, redoc_url=None)
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=MAX_BODY)
    batcher, started = Batcher(batch_size), int(time.time())
    if host in LOOPBACK:  # no page of a browser may reach it under another name
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK])

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(AnyHTTPException, refused)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": started, "owned_by": "you"}
        return {"object": "list", "data": [model]}

    @app.post("/v1/chat/completions")
    async def chat(asked: Chat, request: Request) -> Any:
        if asked.messages[-1].role != "user":
            raise refusal("messages", "found a last turn that is not the user's")
        try:
            prompt = policy.chat_prompt([message.model_dump() for message in asked.messages])
        except PipelineError as error:
            raise refusal("messages", str(error)) from error
        return await respond(request, asked, "chat.completion", prompt, policy.opening)

    @app.post("/v1/completions")
    async def complete(asked: Completion, request: Request) -> Any:
        prompt = policy.tokenizer(asked.prompt)["input_ids"]
        return await respond(request, asked, "text_completion", prompt)

    async def respond(
        request: Request, asked: Asked, kind: str, prompt: list[int], opening: str = ""
    ) -> Any:
        if asked.model != name:
            raise refusal("model", f"found {asked.model!r}, expected {name!r}", 404)
        wanted = asked.max_tokens or max_tokens
        room = policy.room(prompt, wanted)
        if wanted > max_tokens:
            raise refusal("max_tokens", f"found {wanted}, expected at most {max_tokens}")
        if room < (asked.max_tokens or 1):
            raise refusal(
                "max_tokens" if room > 0 else "messages" if opening else "prompt",
                f"found a prompt of {len(prompt)} tokens and an answer of up to {wanted}, expected "
                f"at most {policy.positions} together. Fix: shorten the prompt or lower max_tokens",
            )
        answer = Answer(
            policy, prompt, room, 1.0 if asked.temperature is None else asked.temperature,
            asked.top_p or 1.0, Random(asked.seed), asked.stop or (), opening,
        )  # fmt: skip
        head = {"id": uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": name}
        if asked.stream:
            return StreamingResponse(_events(batcher, answer, head), media_type="text/event-stream")
        async with aclosing(batcher.pieces(answer)) as pieces:
            async for _ in pieces:
                if await request.is_disconnected():
                    break
        read, written = len(prompt), len(answer.ids)
        usage = {"prompt_tokens": read, "completion_tokens": written}
        choices = [_choice(kind, answer.text, answer.finish)]
        return head | {"choices": choices, "usage": usage | {"total_tokens": read + written}}

    return app


def limited(app: ASGIApp) -> ASGIApp:
    """Refuse a request that announces too large a body; FastAPI would do it in plain text."""

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        length = Headers(scope=scope).get("content-length", "0") if "headers" in scope else "0"
        message = f"body: found {length} bytes, expected at most {MAX_BODY}"
        is_large = length.isdecimal() and int(length) > MAX_BODY
        await (failure(message, None, 413) if is_large else app)(scope, receive, send)

    return check


async def invalid(_: Request, error: Exception) -> JSONResponse:
    """The answer to a request with a wrong field."""
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    field = ".".join(map(str, fault["loc"][1:])) or "body"
    if fault["type"] == "extra_forbidden":
        return failure(f"{field}: this server does not support it. Fix: remove it", field)
    found = "" if fault["type"] == "missing" else f"found {shorten(repr(fault['input']), 80)}. "
    return failure(f"{field}: {found}{fault['msg']}", field)


async def refused(_: Request, error: Exception) -> JSONResponse:
    """The answer to a request that raised `refusal`, or that has no such path."""
    assert isinstance(error, AnyHTTPException)
    known: Any = error.detail if isinstance(error.detail, dict) else {"message": error.detail}
    return failure(known["message"], known.get("field"), error.status_code)


def refusal(field: str, message: str, status: int = 400) -> HTTPException:
    """A request that cannot be answered because of a field."""
    return HTTPException(status, {"message": f"{field}: {message}", "field": field})


def failure(message: str, field: str | None, status: int = 400) -> JSONResponse:
    """An error as OpenAI's clients expect it."""
    code = "model_not_found" if field == "model" and status == 404 else None
    kind = "invalid_request_error"
    error = {"message": message, "type": kind, "param": field, "code": code}
    return JSONResponse({"error": error}, status)


async def _events(batcher: Batcher, answer: Answer, head: dict[str, Any]) -> AsyncIterator[str]:
    """The pieces of an answer as server-sent events."""
    kind = head["object"] + ("" if head["object"] == "text_completion" else ".chunk")
    try:
        async with aclosing(batcher.pieces(answer)) as pieces:
            async for text, finish in pieces:
                if text or finish:
                    chunk = head | {"object": kind, "choices": [_choice(kind, text, finish)]}
                    yield f"data: {json.dumps(chunk)}\n\n"
    except Exception as error:  # the status is sent already
        yield f"data: {json.dumps({'error': {'message': type(error).__name__}})}\n\n"
    yield "data: [DONE]\n\n"


def _choice(kind: str, text: str, finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": finish, "logprobs": None}
    if kind == "text_completion":
        return choice | {"text": text}
    part = "message" if kind == "chat.completion" else "delta"
    return choice | {part: {"role": "assistant", "content": text}}


def main(*, folder: str, name: str, host: str, port: int, batch_size: int, max_tokens: int) -> None:
    """Serve a policy under a name until INT or TERM.

    `max_tokens` is the upper limit of that parameter, and its default.
    """
    policy = Policy.load(Path(folder))
    app = application(policy, name, batch_size=batch_size, max_tokens=max_tokens, host=host)
    config = uvicorn.Config(
        limited(app), host, port, log_level="warning", timeout_graceful_shutdown=GRACE_S
    )
    socket = config.bind_socket()
    socket.listen(2048)  # from now on, requests wait
    print(f"{name} answers at http://{host}:{port}/v1; Ctrl-C ends it", flush=True)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run([socket])
    os._exit(0)  # the thread of the batches may still be in its last token


if __name__ == "__main__":
    with explained():
        main(**json.loads(sys.argv[1]))
