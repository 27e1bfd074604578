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

from rlhf_pipeline.errors import PipelineError, StageError

Find = Callable[[str], Path]
HELP = """\
/system TEXT      set the system message; without TEXT, remove it
/compare VERSION  show the answers of a second policy as well; without VERSION, stop that
/reset            begin again, with the same system message
/save FILE        write the conversation as JSON lines, one for each policy
/exit, Ctrl-D     leave; Ctrl-C ends an answer"""


@dataclass
class Speaker:
    """A policy in a process of its own, and its conversation."""

    name: str
    folder: Path
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        command = [sys.executable, "-P", "-m", "rlhf_pipeline.inference.answers", str(self.folder)]
        pipe = subprocess.PIPE
        # In a session of its own, so that Ctrl-C ends an answer and not the process.
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8", start_new_session=True
        )

    def read(self) -> dict[str, Any]:
        """The next object. Raises StageError if the process has ended; it has said why."""
        assert self.process.stdout is not None
        reply: dict[str, Any] = json.loads(self.process.stdout.readline() or "null")
        if reply is None:
            code = self.process.wait()
            raise StageError(f"{self.name}: its program ended with code {code}. Fix: start again")
        return reply

    def say(self, messages: Sequence[dict[str, str]], **settings: Any) -> Iterator[dict[str, Any]]:
        """The objects that answer a conversation. Ctrl-C ends the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"messages": messages, **settings}) + "\n")
        self.process.stdin.flush()
        before = signal.signal(signal.SIGINT, lambda *_: self.process.send_signal(signal.SIGINT))
        try:
            while "text" in (reply := self.read()):
                yield reply
        finally:
            signal.signal(signal.SIGINT, before)
        yield reply


def chat(names: Sequence[str], find: Find, console: Console, **settings: Any) -> None:
    """Talk until the user leaves.

    `find` returns the folder of a policy; `settings` are those of an answer, seed None: any.
    """
    speakers: list[Speaker] = []
    try:
        for name in names:
            join(speakers, name, find, console)
        console.out("/help lists the commands", style="dim")
        while True:
            try:
                # Bytes that are not UTF-8 come as surrogates, which no text contains.
                typed = input("you> ").strip().encode(errors="surrogateescape")
                line = typed.decode(errors="replace")
                if line == "/exit":
                    return
                if line.startswith("/"):
                    obey(line, speakers, find, console)
                elif line:
                    seed = settings["seed"]
                    seed = random.getrandbits(63) if seed is None else seed
                    for speaker in speakers:
                        converse(speaker, line, console, **settings | {"seed": seed})
            except EOFError:
                return
            except KeyboardInterrupt:
                console.out("")
            except (PipelineError, OSError) as error:
                console.out(str(error), style="red", highlight=False)
    finally:
        for speaker in speakers:
            speaker.process.kill()


def join(speakers: list[Speaker], name: str, find: Find, console: Console) -> None:
    """Load a policy as the first or second speaker, in place of the present second one."""
    folder = find(name).resolve()
    speaker = Speaker(folder.name if Path(name).is_dir() else name, folder)
    if speakers:
        speaker.messages = list(speakers[0].messages)
    with console.status(f"loading {speaker.name}"):
        speaker.read()
    console.out(f"{speaker.name} is {folder}", style="dim", highlight=False)
    leave(speakers)
    speakers.append(speaker)


def leave(speakers: list[Speaker]) -> None:
    """End the second speaker."""
    while len(speakers) > 1:
        speakers.pop().process.kill()


def obey(line: str, speakers: list[Speaker], find: Find, console: Console) -> None:
    """Obey a command. Raises PipelineError if there is none of its name."""
    match line.partition(" "):
        case "/help", _, _:
            console.out(HELP, highlight=False)
        case ("/system" | "/reset") as name, _, text:
            for speaker in speakers:
                system = [turn for turn in speaker.messages if turn["role"] == "system"]
                turns = [turn for turn in speaker.messages if turn["role"] != "system"]
                if name == "/system":
                    system = [{"role": "system", "content": text}] if text else []
                speaker.messages = system + (turns if name == "/system" else [])
        case "/save", _, file:
            lines = [json.dumps({"policy": s.name, "messages": s.messages}) for s in speakers]
            with Path(file).expanduser().open("x") as opened:
                opened.write("\n".join([*lines, ""]))
            console.out(f"saved {file}", style="dim", highlight=False)
        case "/compare", _, "":
            leave(speakers)
        case "/compare", _, name:
            join(speakers, name, find, console)
        case name, _, _:
            raise PipelineError(f"found {name}, expected a command. Fix: /help lists them")


def converse(speaker: Speaker, text: str, console: Console, **settings: Any) -> None:
    """Show the answer to a message as it is written, and remember both.

    Raises PipelineError if the message cannot be answered; it is then forgotten.
    """
    messages = [*speaker.messages, {"role": "user", "content": text}]
    said = ""
    console.out(f"{speaker.name}> ", end="", style="bold", highlight=False)
    for reply in speaker.say(messages, **settings):
        said += reply.get("text", "")
        # Control characters could take over the terminal.
        shown = (
            c if c.isprintable() or c in "\n\t" else "\N{BULLET}" for c in reply.get("text", "")
        )
        console.out("".join(shown), end="", highlight=False)
    if "error" in reply:
        raise PipelineError(reply["error"])
    speaker.messages = [*messages, {"role": "assistant", "content": said}]
    ends = {"stop": "", "length": f" (cut at {reply['tokens']} tokens)", "cancelled": " (stopped)"}
    console.out(ends[reply["finish"]], style="dim", highlight=False)
