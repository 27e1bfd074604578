"""One episode: what the policy says, what tools and environment reply, and what that was worth."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlhf_pipeline.config.episodes import EpisodesConfig
from rlhf_pipeline.data.records import Conversation, dialogue
from rlhf_pipeline.data.template import role_marks
from rlhf_pipeline.data.token_contract import Reader, control_tokens
from rlhf_pipeline.data.tokenization import any_of, encode, without
from rlhf_pipeline.episodes.calls import Malformed, ToolCall, calls_in
from rlhf_pipeline.episodes.processes import CallError, EpisodeProcess, Server
from rlhf_pipeline.errors import StageError

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
"""Control characters but for tab and line break, halves of surrogate pairs, and characters that
change the direction of the text."""
ROLES = "system", "user", "tool"


@dataclass
class Episode:
    """The record of an episode, for rewards, metrics and pages."""

    prompt: Conversation
    messages: Conversation = field(default_factory=list)
    """The turns after the prompt, those of the policy without special tokens."""
    reward: float = 0.0
    """The sum of the environment's rewards."""
    calls: int = 0
    """Calls of tools, and steps of the environment."""
    malformed: int = 0
    """Calls that could not be read, or of unknown tools."""
    failed: int = 0
    """Calls that raised an exception, took too long, or ended their process."""
    fault: str = ""
    """What the last of these said."""

    @property
    def turns(self) -> int:
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def answer(self) -> str:
        """The last turn of the policy."""
        said = (one["content"] for one in reversed(self.messages) if one["role"] == "assistant")
        return next(said, "")

    @property
    def text(self) -> str:
        """All turns, those after the first with their roles."""
        first, *others = self.messages
        return "\n\n".join([first["content"], dialogue(others)]) if others else first["content"]

    def record(self) -> dict[str, Any]:
        """The fields as JSON types, for rewards and files."""
        return asdict(self) | {"turns": self.turns, "answer": self.answer}


class Cleaner:
    """Removes from texts of tools and environments what would end or forge a turn, and what is
    beyond a number of tokens."""

    def __init__(self, reader: Reader, tokens: int) -> None:
        self._tokenizer, self._tokens = reader.tokenizer, tokens
        control = control_tokens(*reader)
        self._special = any_of(control)
        self._forging = any_of({*control, *role_marks(reader)})

    def __call__(self, messages: Conversation) -> Conversation:
        return [{**one, "content": self._clean(one["content"])} for one in messages]

    def plain(self, text: str) -> str:
        """A turn of the policy without special tokens."""
        return without(self._special, text).strip()

    def _clean(self, text: str) -> str:
        # A token is seldom longer, and a text of megabytes takes seconds.
        text = without(self._forging, _UNPRINTABLE.sub("", text[: 16 * self._tokens]))
        (ids,) = encode([text], self._tokenizer)
        if len(ids) > self._tokens:
            cut = self._tokenizer.decode(ids[: self._tokens], skip_special_tokens=True)
            text = without(self._forging, cut)
        return text


class Partner:
    """The other side of one episode: tools and environment with their process."""

    def __init__(
        self,
        server: Server,
        config: EpisodesConfig,
        reader: Reader,
        clean: Cleaner,
        task: Mapping[str, Any],
        seed: Sequence[int],
    ) -> None:
        """Begin the episode. Raises StageError if the environment does not."""
        self._server, self._config, self._seed = server, config, seed
        self._reader, self._clean, self.task = reader, clean, task
        self._process: EpisodeProcess | None = None
        self._tools = {schema["function"]["name"] for schema in server.schemas()}
        self.texts: list[str] = []
        """The turns of the policy as it wrote them, with special tokens."""
        messages = [dict(message) for message in task["messages"]]
        if config.environment is not None:
            try:
                messages = self._checked(self._ask("reset", dict(task)))
            except CallError as error:
                raise StageError(f"environment {config.environment}: reset: {error}") from None
        if server.schemas():
            own = messages[0].get("tools") or []
            messages[0] = {**messages[0], "tools": [*own, *server.schemas()]}
        self.episode = Episode(messages)

    def reply(self, text: str) -> Conversation | None:
        """What tools or environment reply to a turn; None: the episode ends with it."""
        self.texts.append(text)
        tokenizer, episode = self._reader.tokenizer, self.episode
        plain = self.said(text)
        calls = calls_in(text, tokenizer) if self._tools else []
        if calls:
            replies = [self._called(call, f"call{n:05}") for n, call in enumerate(calls)]
        elif self._config.environment is not None:
            stepped = self._stepped(plain)
            if stepped is None:
                return None
            replies = stepped
        else:
            return None
        replies = self._clean(replies)
        episode.messages += replies
        return replies

    def said(self, text: str) -> str:
        """Record a turn, which may lack its end; returns it without special tokens."""
        plain = self._clean.plain(text)
        self.episode.messages.append({"role": "assistant", "content": plain})
        return plain

    def close(self) -> None:
        """End the process of the episode."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _called(self, call: ToolCall | Malformed, number: str) -> dict[str, Any]:
        message = {"role": "tool", "tool_call_id": number, "name": getattr(call, "name", "unknown")}
        self.episode.calls += 1
        if isinstance(call, Malformed) or call.name not in self._tools:
            self.episode.malformed += 1
            known = ", ".join(sorted(self._tools))
            reason = call.reason if isinstance(call, Malformed) else f"found no tool {call.name}"
            return message | {"content": f"Error: {reason}; the tools are {known}"}
        try:
            return message | {"content": self._ask("call", call.name, call.arguments)}
        except CallError as error:
            return message | {"content": f"Error: {self._failed(error)}"}

    def _stepped(self, text: str) -> Conversation | None:
        self.episode.calls += 1
        try:
            messages, reward, done = self._ask("step", text)
            if not math.isfinite(reward):
                raise CallError(f"found the reward {reward}, expected a finite number")
            replies = [] if done else self._checked(messages)
        except CallError as error:
            self._failed(error)
            return None
        self.episode.reward += reward
        return replies or None

    def _failed(self, error: CallError) -> str:
        self.episode.failed += 1
        self.episode.fault = str(error)
        return str(error)

    def _ask(self, *message: Any) -> Any:
        if self._process is None:
            self._process = self._server.episode(self._seed)
        try:
            return self._process.ask(*message)
        except CallError as error:
            if error.lost:  # a later call of a tool gets another process
                self.close()
            raise

    def _checked(self, messages: Conversation) -> Conversation:
        roles = [message["role"] for message in messages]
        if not roles or {*roles} - {*ROLES}:
            raise CallError(f"found messages of {roles}, expected some of {', '.join(ROLES)}")
        return self._clean(messages)
