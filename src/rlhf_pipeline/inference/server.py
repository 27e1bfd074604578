"""Program: serve a policy by the part of OpenAI's HTTP interface that clients need to talk to it.

`python -m rlhf_pipeline.inference.server SETTINGS`, with the fields of `Settings` as JSON.
"""

import json
import os
import random
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.inference.batching import Batcher
from rlhf_pipeline.inference.policy import Answer, Policy, explained

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_BODY = 2**20
"""Bytes of a request, at most."""
GRACE_S = 5
"""Time that answers have to finish after Ctrl-C."""


@dataclass(frozen=True)
class Settings:
    """What `kedro rlhf serve` passes to this program."""

    folder: str
    name: str
    """Name of the model in requests."""
    host: str
    port: int
    batch_size: int
    max_tokens: int
    """Upper limit of the parameter, and its default."""


def _text(value: str) -> str:
    value.encode()  # raises for half a surrogate pair, which JSON can contain and no text can
    return value


Text = Annotated[str, AfterValidator(_text)]


class Fields(BaseModel):
    """JSON without other fields than these; null means the default."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class Asked(Fields):
    """What all requests have."""

    model: str
    max_tokens: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("max_tokens", "max_completion_tokens")
    )
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    stop: list[Annotated[Text, Field(min_length=1)]] = Field([], max_length=4)
    seed: int | None = None
    n: Literal[1] = 1
    stream: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _texts(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop


class Completion(Asked):
    """A request for the text that follows another one."""

    prompt: Text = Field(min_length=1)


class Message(Fields):
    """One turn of a dialogue."""

    role: Literal["system", "user", "assistant"]
    content: Text


class Chat(Asked):
    """A request for the next turn of a dialogue."""

    messages: list[Message] = Field(min_length=1)


class Refusal(Exception):  # noqa: N818 - the request is wrong, not the program
    """A request that cannot be answered."""

    def __init__(self, message: str, field: str | None, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.status = field, status


def application(policy: Policy, settings: Settings) -> FastAPI:
    """The server of one policy."""
    app = FastAPI(title="rlhf-pipeline", docs_url=None, redoc_url=None, max_body_size=MAX_BODY)
    batcher, started = Batcher(settings.batch_size), int(time.time())
    if settings.host in LOOPBACK:  # no page of a browser may reach it under another name
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK])

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        fault = error.errors()[0]
        match fault["type"], ".".join(map(str, fault["loc"][1:])):
            case "extra_forbidden", field:
                return failure(f"{field}: this server does not support it. Fix: remove it", field)
            case "json_invalid", place:
                return failure(f"body: found no JSON at character {place}", None)
            case "missing", field:
                return failure(f"{field}: found nothing. Fix: set it", field)
            case _, field:
                found = shorten(repr(fault["input"]), 80)
                return failure(f"{field or 'body'}: found {found}. {fault['msg']}", field or None)

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> JSONResponse:
        return failure(str(error), error.field, error.status)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        return failure(str(error.detail), None, error.status_code)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return failure(f"{type(error).__name__}; the server's log has its stack", None, 500)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": settings.name, "object": "model", "created": started, "owned_by": "you"}
        return {"object": "list", "data": [model]}

    @app.post("/v1/chat/completions")
    async def chat(asked: Chat, request: Request) -> Any:
        if asked.messages[-1].role != "user":
            raise Refusal("messages: found a last turn that is not the user's", "messages")
        try:
            prompt = policy.chat_prompt([message.model_dump() for message in asked.messages])
        except PipelineError as error:
            raise Refusal(str(error), "messages") from error
        return await respond(request, asked, prompt, policy.opening)

    @app.post("/v1/completions")
    async def complete(asked: Completion, request: Request) -> Any:
        return await respond(request, asked, policy.tokenizer(asked.prompt)["input_ids"])

    async def respond(request: Request, asked: Asked, prompt: list[int], opening: str = "") -> Any:
        if asked.model != settings.name:
            raise Refusal(f"model: found {asked.model!r}, expected {settings.name!r}", "model", 404)
        answer = Answer(
            policy, prompt, answer_limit(policy, settings, asked, prompt), asked.temperature,
            asked.top_p, random.getrandbits(63) if asked.seed is None else asked.seed, asked.stop,
            opening,
        )  # fmt: skip
        kind = "chat.completion" if isinstance(asked, Chat) else "text_completion"
        head = {"id": f"{kind}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()),
                "model": settings.name}  # fmt: skip
        if asked.stream:
            events = _events(batcher, answer, head)
            return StreamingResponse(events, media_type="text/event-stream")
        async with aclosing(batcher.pieces(answer)) as pieces:
            async for _ in pieces:
                if await request.is_disconnected():
                    break
        counts = len(prompt), len(answer.ids)
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        usage = dict(zip(names, (*counts, sum(counts)), strict=True))
        return head | {"choices": [_choice(kind, answer.text, answer.finish)], "usage": usage}

    return app


def answer_limit(policy: Policy, settings: Settings, asked: Asked, prompt: list[int]) -> int:
    """The tokens that an answer may have; raises Refusal if the request asks for more."""
    limit = settings.max_tokens
    wanted, room = asked.max_tokens or limit, policy.room(prompt)
    if wanted > limit:
        raise Refusal(f"max_tokens: found {wanted}, expected at most {limit}", "max_tokens")
    if room is None or wanted <= room:
        return wanted
    if asked.max_tokens is None and room > 0:
        return room
    raise Refusal(
        f"found a prompt of {len(prompt)} tokens and an answer of up to {wanted}, expected at most "
        f"{policy.positions} together. Fix: shorten the prompt or lower max_tokens",
        "messages" if isinstance(asked, Chat) else "prompt",
    )


def failure(message: str, field: str | None, status: int = 400) -> JSONResponse:
    """An error as OpenAI's clients expect it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = "model_not_found" if field == "model" and status == 404 else None
    content = {"error": {"message": message, "type": kind, "param": field, "code": code}}
    return JSONResponse(content, status)


async def _events(batcher: Batcher, answer: Answer, head: dict[str, Any]) -> AsyncIterator[str]:
    """The pieces of an answer as server-sent events."""
    kind = head["object"]
    chunk = head | {"object": "chat.completion.chunk" if kind == "chat.completion" else kind}
    try:
        async with aclosing(batcher.pieces(answer)) as pieces:
            async for text, finish in pieces:
                if text or finish:
                    choices = [_choice(kind, text, finish, streamed=True)]
                    yield f"data: {json.dumps(chunk | {'choices': choices})}\n\n"
    except Exception as error:  # the status is sent already
        yield f"data: {json.dumps({'error': {'message': type(error).__name__}})}\n\n"
    yield "data: [DONE]\n\n"


def _choice(kind: str, text: str, finish: str | None, *, streamed: bool = False) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": finish, "logprobs": None}
    if kind == "text_completion":
        return choice | {"text": text}
    return choice | {
        "delta" if streamed else "message": {"role": "assistant", "content": text},
    }


def main(settings: Settings) -> None:
    """Serve until INT or TERM."""
    policy = Policy.load(Path(settings.folder))
    config = uvicorn.Config(
        application(policy, settings), settings.host, settings.port, log_level="warning",
        timeout_graceful_shutdown=GRACE_S,
    )  # fmt: skip
    socket = config.bind_socket()
    socket.listen(2048)  # from now on, requests wait
    print(f"{settings.name} answers at http://{settings.host}:{settings.port}/v1", flush=True)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run([socket])
    os._exit(0)  # the thread of the batches may still be in its last token


if __name__ == "__main__":
    with explained():
        main(Settings(**json.loads(sys.argv[1])))
