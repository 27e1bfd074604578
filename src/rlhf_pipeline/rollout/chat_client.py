"""Questions to a chat model behind an OpenAI-compatible server, for judges and rewards.

Replies are kept in a folder by the SHA-256 of their request, so a repeated evaluation or a step
that is resumed asks nothing twice.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

from rlhf_pipeline.config.chat import ChatConfig
from rlhf_pipeline.errors import StageError, without_secrets
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.text_statistics import refuses

TOKENS = ("prompt_tokens", "completion_tokens")
COUNTS = ("refusals", "unparsable", "calls", "cached", *TOKENS)
"""What is counted: replies that refuse or contain no verdict; requests, and replies known from
earlier; tokens of the requests."""

RETRIES, TIMEOUT_S = 6, 120
"""Repetitions of a request that the server refuses for a while (429, 5xx); longest request."""


def reply_folder(job: LaunchedJob) -> Path:
    """The folder of the workspace with the replies, which later stages reuse."""
    return job.directory.parents[1] / "judge_replies"


def as_text(messages: Iterable[Mapping[str, str]]) -> str:
    """A prompt as a chat model reads it."""
    return "\n\n".join(f"{m['role'].title()}: {m['content']}" for m in messages)


def filled(template: str, **fields: str) -> str:
    """The template with its fields; an answer that contains a field's name stays as it is."""
    return re.sub(rf"\{{({'|'.join(fields)})\}}", lambda field: fields[field[1]], template)


def ask(
    config: ChatConfig,
    questions: Iterable[str],
    verdict: Callable[[str], float | None],
    cache: Path,
    counts: Counter[str],
    place: str,
) -> dict[str, float | None]:
    """The verdict of the reply to each question, from the folder `cache` or from the server.

    Equal questions are asked once. `verdict` reads a reply; None: the reply has no verdict. `place`
    is the judge's, for messages. Raises StageError if the server fails, or most replies are
    unusable.
    """
    from openai import OpenAI, OpenAIError

    cache.mkdir(parents=True, exist_ok=True)
    key = os.environ[config.api_key_env] if config.api_key_env else "none"
    client = OpenAI(base_url=config.base_url, api_key=key, max_retries=RETRIES, timeout=TIMEOUT_S)

    def reply(question: str) -> tuple[dict[str, Any], bool]:
        messages = [{"role": "user", "content": question}]
        request: dict[str, Any] = {"model": config.model, "messages": messages}
        request["extra_body"] = config.request
        text = json.dumps([config.base_url, request], sort_keys=True)
        path = cache / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
        if path.is_file():
            return json.loads(path.read_text()), True
        completion = client.chat.completions.create(**request)
        message = completion.choices[0].message
        found = {name: getattr(completion.usage, name, 0) for name in TOKENS}
        found["text"] = message.content or message.refusal or ""
        own = path.with_name(uuid4().hex)  # another rank may ask the same
        write_atomically(own, json.dumps(found))
        own.replace(path)
        return found, False

    distinct, verdicts, unusable = list(dict.fromkeys(questions)), dict[str, float | None](), []
    try:
        with ThreadPoolExecutor(config.concurrency) as pool:
            for question, (found, known) in zip(distinct, pool.map(reply, distinct), strict=True):
                heartbeat.tick()
                text = str(found["text"])
                verdicts[question] = verdict(text)
                counts["cached" if known else "calls"] += 1
                for name in () if known else TOKENS:
                    counts[name] += found[name]
                if verdicts[question] is None:
                    unusable.append(text)
                    counts["refusals" if refuses(text) else "unparsable"] += 1
    except (OpenAIError, AttributeError, LookupError, TypeError, ValueError) as error:
        # The last four: an answer without the fields of a completion.
        raise StageError(
            f"{place}: {config.model} at {without_secrets(config.base_url)} did not judge: "
            f"{type(error).__name__}: {without_secrets(str(error))}. Fix: repeat the command when "
            "the server answers; the replies so far are kept"
        ) from None
    if len(unusable) > len(distinct) / 2:
        raise StageError(
            f"{place}: found {len(unusable)} of {len(distinct)} replies of {config.model} without "
            f"a verdict, expected at most half, for example {unusable[0]!r}. Fix: use another "
            "model, rubric or openai.template, or allow longer replies (openai.request); to ask "
            f"again, remove {cache}"
        )
    return verdicts
