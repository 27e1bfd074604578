"""`kedro rlhf chat` in a terminal."""

import json
import os
import re
import signal
import sys
from functools import partial
from pathlib import Path

import pexpect
import pytest

PROJECT = Path(__file__).parents[2]
PROMPT = "you> "


@pytest.fixture
def start(tmp_path):
    """Starts a chat; the function waits for its prompt."""
    started = []

    def start(*arguments):
        command = ["-m", "kedro", "rlhf", "chat", *map(str, arguments), "--env=tiny",
                   f"--params=root={tmp_path / 'data'}"]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(PROJECT / "src"), "TERM": "xterm"}
        chat = pexpect.spawn(
            sys.executable, command, cwd=str(PROJECT), env=environment, encoding="utf-8",
            timeout=600, dimensions=(40, 100),
            # A shell lets its background jobs ignore Ctrl-C, and what they start inherits that.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        started.append(chat)
        chat.expect_exact(PROMPT)
        return chat

    yield start
    for chat in started:
        chat.close(force=True)


def say(chat, line):
    """Type a line; return what is shown until the next prompt, without colours and the line."""
    chat.sendline(line)
    chat.expect_exact(PROMPT)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", chat.before).replace("\r", "")
    return shown.partition("\n")[2]


def saved(chat, file):
    """The conversations, by policy."""
    assert say(chat, f"/save {file}") == f"saved {file}\n"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {line["policy"]: line["messages"] for line in lines}


def test_a_conversation_with_two_policies(start, published, other_published, tmp_path):
    chat = start(published, "--compare", other_published, "--max-tokens=6", "--temperature=0")
    shown = say(chat, "what is snow?")
    names = [published.name, other_published.name]
    assert [line.partition(">")[0] for line in shown.splitlines()] == names
    say(chat, "and ice?")
    found = saved(chat, tmp_path / "both.jsonl")
    assert list(found) == names
    for turns in found.values():
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2
        assert [turn["content"] for turn in turns[::2]] == ["what is snow?", "and ice?"]
    assert found[names[0]][1]["content"] in shown
    assert found[names[0]][1] != found[names[1]][1]

    # The second policy leaves, and comes back with the conversation of the first one.
    assert say(chat, "/compare") == ""
    say(chat, "/reset")
    alone = say(chat, "what is snow?")
    assert alone == shown.splitlines(keepends=True)[0]
    assert f"{names[1]} is {other_published}" in say(chat, f"/compare {other_published}")
    found = saved(chat, tmp_path / "again.jsonl")
    assert found[names[1]] == found[names[0]] and len(found[names[0]]) == 2

    # The system message stays at a reset.
    say(chat, "/system be nice")
    say(chat, "hi")
    say(chat, "/reset")
    assert saved(chat, tmp_path / "reset.jsonl")[names[0]] == [
        {"role": "system", "content": "be nice"}
    ]
    chat.sendeof()
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 0


def test_mistakes_do_not_end_it(start, published, tmp_path):
    chat = start(published, "--max-tokens=6", "--temperature=0")
    first = say(chat, "hi")
    assert say(chat, "/sav x") == "found /sav, expected a command. Fix: /help lists them\n"
    assert "found 'nonsense', expected a version" in say(chat, "/compare nonsense")
    (tmp_path / "mine").write_text("precious")
    assert "File exists" in say(chat, f"/save {tmp_path / 'mine'}")
    assert (tmp_path / "mine").read_text() == "precious"
    too_long = say(chat, "x " * 70)
    assert "expected fewer than the 128 that the model can read. Fix: /reset" in too_long
    assert "found the control token <|end|>" in say(chat, "a<|end|>b")
    assert "/compare VERSION" in say(chat, "/help")
    found = saved(chat, tmp_path / "kept.jsonl")
    assert [turn["content"] for turn in found[published.name]][:1] == ["hi"]
    assert len(found[published.name]) == 2  # what could not be answered is forgotten
    say(chat, "/reset")
    assert say(chat, "hi") == first
    chat.sendline("/exit")
    chat.expect(pexpect.EOF)


def test_ctrl_c_ends_an_answer_and_not_the_chat(start, make_model, publish, tmp_path):
    # A model without positions answers until its limit.
    folder = publish(make_model("bloom"))
    chat = start(folder, "--max-tokens=1000000")
    chat.sendline("hi")
    chat.expect_exact(f"{folder.name}> \x1b[0m")
    chat.expect("[A-Za-z]")
    chat.sendintr()
    chat.expect_exact("(stopped)")
    chat.expect_exact(PROMPT)
    turns = saved(chat, tmp_path / "turns.jsonl")[folder.name]
    assert turns[1]["content"]
    chat.send("half a line")
    chat.expect_exact("half a line")
    chat.sendintr()
    # Readline can miss a signal that comes just before it waits for the next key.
    while chat.expect_exact([PROMPT, pexpect.TIMEOUT], timeout=5):
        chat.sendintr()
    assert say(chat, "/help").startswith("/system TEXT")
    chat.sendeof()
    chat.expect(pexpect.EOF)


def test_control_characters_of_an_answer_do_not_reach_the_terminal(
    start, make_model, publish, tmp_path
):
    folder = publish(make_model("llama", seed=3))
    chat = start(folder, "--temperature=2", "--max-tokens=100", "--seed=4")
    shown = say(chat, "hi")
    content = saved(chat, tmp_path / "turns.jsonl")[folder.name][1]["content"]
    assert any(ord(character) < 9 for character in content)
    assert not any(ord(character) < 9 for character in shown)


def test_another_artifact_is_refused(published, tmp_path, publish, make_model):
    folder = publish(make_model("llama"), "reward_model")
    config = folder / "config.json"
    config.write_text(config.read_text().replace("ForCausalLM", "ForSequenceClassification"))
    command = ["-m", "kedro", "rlhf", "chat", str(folder), "--env=tiny"]
    chat = pexpect.spawn(
        sys.executable, [*command, f"--params=root={tmp_path}"], cwd=str(PROJECT),
        encoding="utf-8", timeout=600, dimensions=(40, 400),
    )  # fmt: skip
    chat.expect_exact("found an artifact of stage reward_model, expected a language model")
    chat.expect(pexpect.EOF)
