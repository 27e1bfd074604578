"""One episode: what the policy says, what tools and environment reply, and what that was worth."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from rlhf_pipeline.config.episodes import EpisodesConfig
from rlhf_pipeline.data.records import Conversation, dialogue
from rlhf_pipeline.data.template import role_marks
from rlhf_pipeline.data.token_contract import Reader, any_of, control_tokens
from rlhf_pipeline.data.tokenization import encode, without
from rlhf_pipeline.episodes.calls import Malformed, ToolCall, calls_in
from rlhf_pipeline.episodes.processes import CallError, EpisodeProcess, Server
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime import heartbeat

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
"""Control characters but for tab and line break, halves of surrogate pairs, and characters that
change the direction of the text."""
ROLES = "system", "user", "tool"
MOST_CALLS = 16  # of one turn


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
    is_open: bool = False
    """Whether the last turn was cut within a call."""

    @property
    def turns(self) -> int:
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def answer(self) -> str:
        """The last turn of the policy; empty if it is a call, which the limits left unanswered."""
        said = [one for one in self.messages if one["role"] in ("assistant", "tool")]
        is_last = bool(said) and said[-1]["role"] == "assistant" and not self.is_open
        return str(said[-1]["content"]) if is_last else ""

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

    def __init__(self, reader: Reader) -> None:
        self._tokenizer, control = reader.tokenizer, control_tokens(*reader)
        self._special = any_of(control)
        self._forging = any_of({*control, *role_marks(reader)})

    def plain(self, text: str) -> str:
        """A turn of the policy without special tokens."""
        return without(self._special, text).strip()

    def text(self, text: str, tokens: int) -> str:
        """A text of others."""
        # A token is seldom longer, and a text of megabytes takes seconds.
        text = without(self._forging, _UNPRINTABLE.sub("", text[: 16 * tokens]))
        (ids,) = encode([text], self._tokenizer)
        if len(ids) > tokens:
            cut = self._tokenizer.decode(ids[:tokens], skip_special_tokens=True)
            text = without(self._forging, cut)
        return text


class Partner:
    """The other side of one episode: tools and environment with their process.

    Args:
        limit: most tokens of a reply.
        task: what an environment gets.
        seed: the randomness of tools and environment.
    """

    def __init__(
        self,
        server: Server,
        config: EpisodesConfig,
        reader: Reader,
        clean: Cleaner,
        limit: int,
        task: Mapping[str, Any],
        seed: Sequence[int],
    ) -> None:
        """Begin the episode. Raises StageError if the environment does not."""
        self._server, self._config, self._seed = server, config, seed
        self._reader, self._clean, self._limit = reader, clean, limit
        self._process: EpisodeProcess | None = None
        self._lost = False
        self._tools = {schema["function"]["name"] for schema in server.schemas()}
        self.texts: list[tuple[str, str]] = []
        """The turns of the policy that got a reply or ended, with special tokens, each after the
        text before it."""
        self.replied = 0
        """The messages without a last turn that was cut."""
        self.asked = ""
        """The text before the next turn, for a tokenizer that reads calls by itself."""
        messages = [dict(message) for message in task["messages"]]
        if config.environment is not None:
            limit = 2 * config.max_prompt_tokens  # a prompt that is too long is refused, not cut
            try:
                messages = self._checked(self._ask("reset", dict(task)), limit, "assistant")
            except CallError as error:
                raise StageError(f"environment {config.environment}: reset: {error}") from None
        if server.schemas():
            own = messages[0].get("tools") or []
            messages[0] = {**messages[0], "tools": [*own, *server.schemas()]}
        self.episode = Episode(messages)

    def reply(self, text: str) -> Conversation | None:
        """What tools or environment reply to a turn; None: the episode ends with it."""
        self.texts.append((self.asked, text))
        plain = self._said(text)
        if calls := self._calls(text):
            replies: Conversation | None = [*map(self._called, calls, count())]
        elif self._config.environment is not None:
            replies = self._stepped(plain)
        else:
            replies = None
        if self._lost and self._config.environment is not None:
            replies = None  # the environment was in the process
        self.episode.messages += replies or []
        self.replied = len(self.episode.messages)
        return replies

    def cut(self, text: str) -> None:
        """Record a turn without an end. A call in it is no answer."""
        self._said(text)
        self.episode.is_open = bool(self._calls(text))

    def close(self) -> None:
        """End the process of the episode."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _said(self, text: str) -> str:
        plain = self._clean.plain(text)
        self.episode.messages.append({"role": "assistant", "content": plain})
        return plain

    def _calls(self, text: str) -> list[ToolCall | Malformed]:
        return calls_in(text, self._reader.tokenizer, self.asked) if self._tools else []

    def _called(self, call: ToolCall | Malformed, number: int) -> dict[str, Any]:
        heartbeat.report_progress()
        self.episode.calls += 1
        name, known = "unknown", ", ".join(sorted(self._tools))
        if number >= MOST_CALLS:
            said, fault = f"found more than {MOST_CALLS} calls in a turn", True
        elif isinstance(call, Malformed):
            said, fault = call.reason, True
        elif call.name not in self._tools:
            said, fault = f"found no tool {call.name}; the tools are {known}", True
        else:
            name, fault = call.name, False
            try:
                said = self._ask("call", call.name, call.arguments)
            except CallError as error:
                said = self._failed(error)
        self.episode.malformed += fault
        said = self._clean.text(f"Error: {said}" if fault else said, self._limit)
        return {"role": "tool", "tool_call_id": f"call{number:05}", "name": name, "content": said}

    def _stepped(self, text: str) -> Conversation | None:
        self.episode.calls += 1
        try:
            messages, reward, done = self._ask("step", text)
            if not math.isfinite(reward):
                raise CallError(f"found the reward {reward}, expected a finite number")
            replies = [] if done else self._checked(messages, self._limit)
        except CallError as error:
            self._failed(error)
            return None
        self.episode.reward += reward
        return replies or None

    def _failed(self, error: CallError) -> str:
        self.episode.failed += 1
        self.episode.fault = self._clean.text(str(error), self._limit)
        return f"Error: {error}"

    def _ask(self, *message: Any) -> Any:
        if self._process is None:
            self._process = self._server.episode(self._seed)
        try:
            return self._process.ask(*message)
        except CallError as error:
            if error.lost:  # a later call of a tool gets another process
                self._lost = True
                self.close()
            raise

    def _checked(self, messages: Conversation, limit: int, *more: str) -> Conversation:
        roles, known = [message["role"] for message in messages], (*ROLES, *more)
        if not roles or {*roles} - {*known}:
            raise CallError(f"found messages of {roles}, expected some of {', '.join(known)}")
        return [{**one, "content": self._clean.text(one["content"], limit)} for one in messages]
