"""`kedro rlhf chat`: talk to a policy, or to two of them, in the terminal."""

import json
import random
import readline  # noqa: F401 - lets the user edit and repeat lines
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from rlhf_pipeline.errors import PipelineError, StageError, suggestion

COMMANDS = {
    "/system": "TEXT      set the system message; without TEXT, remove it",
    "/compare": "VERSION  show the answers of a second policy as well; without VERSION, stop that",
    "/reset": "           begin again, with the same system message",
    "/save": "FILE        write the conversation as JSON lines, one for each policy",
    "/help": "            show this list",
    "/exit": "            leave, as Ctrl-D does; Ctrl-C ends an answer",
}


@dataclass
class Speaker:
    """A policy in a process of its own, and its conversation."""

    name: str
    """As the user called it."""
    folder: Path
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        command = [sys.executable, "-m", "rlhf_pipeline.inference.answers", str(self.folder)]
        pipe = subprocess.PIPE
        # In a session of its own, so that Ctrl-C ends an answer and not the process.
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8", start_new_session=True
        )

    def wait_until_loaded(self) -> None:
        """Raises StageError if the policy cannot be loaded; its program has said why."""
        self._read()

    def say(self, messages: Sequence[dict[str, str]], **settings: Any) -> Iterator[dict[str, Any]]:
        """Answer a conversation: the objects of `rlhf_pipeline.inference.answers`.

        Ctrl-C ends the answer. Raises StageError if the process has ended.
        """
        process = self._process
        assert process.stdin is not None
        process.stdin.write(json.dumps({"messages": messages, **settings}) + "\n")
        process.stdin.flush()
        before = signal.signal(signal.SIGINT, lambda *_: process.send_signal(signal.SIGINT))
        try:
            while "text" in (reply := self._read()):
                yield reply
            yield reply
        finally:
            signal.signal(signal.SIGINT, before)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise StageError(
                f"{self.name}: the program of the policy ended with code {self._process.wait()}. "
                "Fix: read its message above, and start the chat again"
            )
        reply: dict[str, Any] = json.loads(line)
        return reply


def chat(
    names: Sequence[str], folder_of: Callable[[str], Path], console: Console, **settings: Any
) -> None:
    """Talk until the user leaves. `settings` are those of an answer; seed None: any."""
    speakers: list[Speaker] = []

    def start(name: str) -> Speaker:
        folder = folder_of(name).resolve()
        speaker = Speaker(folder.name if Path(name).is_dir() else name, folder)
        speakers.append(speaker)
        with console.status(f"loading {escape(name)}"):
            speaker.wait_until_loaded()
        console.print(f"[dim]{escape(f'{speaker.name} is {folder}')}", soft_wrap=True)
        return speaker

    try:
        for name in names:
            start(name)
        console.print("[dim]/help lists the commands[/dim]")
        while (line := _line()) is not None and line != "/exit":
            try:
                if line.startswith("/"):
                    obey(line, speakers, start, console)
                elif line:
                    seed = settings["seed"]
                    seed = random.getrandbits(63) if seed is None else seed
                    for speaker in speakers:
                        converse(speaker, line, console, **settings | {"seed": seed})
            except (PipelineError, OSError) as error:
                console.print(f"[red]{escape(str(error))}", soft_wrap=True)
    finally:
        for speaker in speakers:
            speaker.end()


def obey(
    line: str, speakers: list[Speaker], start: Callable[[str], Speaker], console: Console
) -> None:
    """Obey a command. Raises PipelineError if there is none of its name."""
    name, _, text = line.partition(" ")
    match name:
        case "/help":
            for command, meaning in COMMANDS.items():
                console.out(command, meaning, highlight=False)
        case "/system":
            system = [{"role": "system", "content": text}] if text else []
            for speaker in speakers:
                turns = [turn for turn in speaker.messages if turn["role"] != "system"]
                speaker.messages = system + turns
        case "/reset":
            for speaker in speakers:
                speaker.messages = [t for t in speaker.messages if t["role"] == "system"]
        case "/save":
            with Path(text).expanduser().open("x") as file:
                for speaker in speakers:
                    file.write(json.dumps({"policy": speaker.name, "messages": speaker.messages}))
                    file.write("\n")
            console.print(f"[dim]{escape(f'saved {text}')}")
        case "/compare":
            former = speakers[1:]
            if text:
                start(text).messages = list(speakers[0].messages)
            for speaker in former:
                speakers.remove(speaker)
                speaker.end()
        case _:
            near = suggestion(name, COMMANDS)
            raise PipelineError(f"found {name}{near}, expected a command. Fix: /help lists them")


def converse(speaker: Speaker, text: str, console: Console, **settings: Any) -> None:
    """Show the answer to a message as it is written, and remember both.

    Raises PipelineError if the message cannot be answered; it is then forgotten.
    """
    messages = [*speaker.messages, {"role": "user", "content": text}]
    said = ""
    console.out(f"{speaker.name}> ", end="", style="bold")
    for reply in speaker.say(messages, **settings):
        said += reply.get("text", "")
        console.out(_printable(reply.get("text", "")), end="", highlight=False)
    if "error" in reply:
        raise PipelineError(reply["error"])
    console.out("")
    speaker.messages = [*messages, {"role": "assistant", "content": said}]
    if reply["finish"] != "stop":
        why = "stopped" if reply["finish"] == "cancelled" else f"cut at {reply['tokens']} tokens"
        console.print(f"[dim]({why})[/dim]")


def _line() -> str | None:
    """What the user types; None at the end of the input."""
    try:
        # Bytes that are not UTF-8 come as surrogates, which no text contains.
        return input("you> ").strip().encode(errors="surrogateescape").decode(errors="replace")
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None


def _printable(text: str) -> str:
    """The text without control characters, which could take over the terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
