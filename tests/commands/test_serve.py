"""`kedro rlhf serve` and `kedro rlhf chat`: real programs on a tiny policy; `kedro rlhf label`."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pexpect
import psutil
import pytest
from click.testing import CliRunner
from kedro.framework.startup import bootstrap_project
from kedro.io import DataCatalog, MemoryDataset
from openai import OpenAI
from ports import reserved_port
from processes import descendants
from waiting import wait_until

from rlhf_pipeline.cli import cli
from rlhf_pipeline.commands import serve as module
from rlhf_pipeline.commands.serve import label, playing
from rlhf_pipeline.data.records import Message
from rlhf_pipeline.errors import ConfigError, DataError, StageError
from rlhf_pipeline.kedro_run.artifacts import Ledger
from rlhf_pipeline.runtime.manifest import Manifest

PROJECT = Path(__file__).parents[2]
SOURCE = {"PYTHONPATH": str(PROJECT / "src")}


def arguments(command, policy, root, *options):
    where = ["--env=tiny", f"--params=root={root}"]
    return ["-m", "kedro", "rlhf", command, str(policy), *options, *where]


@pytest.mark.slow
def test_the_server_answers_openais_clients_until_ctrl_c(published, tmp_path):
    with reserved_port() as port:
        pass
    command = [sys.executable, *arguments("serve", published, tmp_path, f"--port={port}")]
    server = subprocess.Popen(
        command, cwd=PROJECT, env=os.environ | SOURCE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert server.stdout.readline() == f"model {published.name}, {published}\n"
        wait_until(lambda: module.answers(port) or server.poll() is not None)
        asked = {
            "model": published.name,
            "messages": [{"role": "user", "content": "what is snow?"}],
            "temperature": 0.0,
            "max_tokens": 6,
        }
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            first, second = (client.chat.completions.create(**asked) for _ in range(2))
        assert first.choices[0].message.content == second.choices[0].message.content != ""
        listening = [each for each in psutil.net_connections("inet") if each.laddr.port == port]
        assert {each.laddr.ip for each in listening if each.status == "LISTEN"} == {"127.0.0.1"}
        server.send_signal(signal.SIGINT)
        server.wait(60)
    finally:
        server.kill()
        server.communicate()


@pytest.mark.long
def test_a_conversation_in_a_terminal(published, tmp_path):
    options = ("--max-tokens=6", "--temperature=0")
    chat = pexpect.spawn(
        sys.executable, arguments("chat", published, tmp_path, *options), cwd=str(PROJECT),
        env=os.environ | SOURCE | {"TERM": "dumb"}, encoding="utf-8", timeout=120,
        dimensions=(40, 100),
        # A shell lets its background jobs ignore Ctrl-C, and what they start inherits that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        chat.expect_exact("<you>:")
        (server,) = [
            program for program in descendants(chat.pid) if "serve" in program.info["cmdline"]
        ]
        chat.sendline("what is snow?")
        chat.expect_exact(f"<{published.name}>:")
        chat.expect("6 tokens in")
        assert re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", chat.before).strip()
        chat.expect_exact("Continue generating?")
        chat.sendline("n")
        chat.expect_exact("<you>:")
        chat.sendline("!exit")
        chat.expect(pexpect.EOF)
        chat.close()
        assert chat.exitstatus == 0
        assert not server.is_running()
    finally:
        chat.close(force=True)


def test_a_chat_whose_server_ends_names_the_command_that_shows_why(published, monkeypatch):
    monkeypatch.setattr(module, "TRANSFORMERS", "no_such_module")
    ledger = Ledger(DataCatalog(), PROJECT)
    with pytest.raises(StageError, match="the server ended") as caught:
        module.chat.callback(ledger, str(published), 6, 0.0, 1)
    shown = caught.value.message.partition("by `")[2].rstrip("`")
    assert "--default-seed=1" in shown
    done = subprocess.run(["sh", "-c", shown], capture_output=True, text=True)
    assert done.returncode != 0 and "No module named no_such_module" in done.stderr


def test_vllm_serves_where_it_is_installed_and_options_go_to_the_server(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_TRUST_REMOTE_CODE", "true")
    command = module.serving(module.VLLM, tmp_path / "ppo_model", "0.0.0.0", 1, "--max-model-len=9")
    assert command[3:] == [
        *("vllm.entrypoints.cli.main", "serve", "ppo_model", "--host=0.0.0.0", "--port=1"),
        *("--trust-remote-code", "--max-model-len=9"),
    ]


def test_the_policy_is_looked_for_before_anything_else(tmp_path):
    """Nothing has been trained: the fix is a run, not a package or a port."""
    for command in ("chat", "serve"):
        options = ["--env=tiny", f"--params=root={tmp_path / 'root'}"]
        done = CliRunner().invoke(
            cli, ["rlhf", command, "champion", *options], obj=bootstrap_project(PROJECT)
        )
        assert done.exit_code != 0
        assert "Fix: nothing is registered as rlhf-policy-tiny yet; `kedro run` trains" in (
            " ".join(done.output.split())
        )


@pytest.fixture
def ledger(tmp_path):
    workspace = MemoryDataset(tmp_path / "data" / "07_workspace")
    return Ledger(DataCatalog({"workspace": workspace}), tmp_path)


def test_a_port_in_use_is_named_and_a_file_of_something_else_is_not_taken_for_votes(
    ledger, tmp_path
):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "Q?", "first": "a", "second": "b"}))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"found 127\.0\.0\.1:{port} unusable \(Address"):
            label.callback(ledger, None, str(pairs), None, "127.0.0.1", port)
    assert (tmp_path / "data" / "01_raw" / "votes.jsonl").read_bytes() == b""
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: found no vote"):
        label.callback(ledger, None, str(pairs), str(pairs), "127.0.0.1", 0)


def test_pairs_come_from_a_file_of_any_format(ledger, tmp_path, monkeypatch, capsys):
    pairs = []
    monkeypatch.setattr(
        "rlhf_pipeline.labelling.server.application", lambda found, *_: pairs.extend(found)
    )
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    file = tmp_path / "pairs.csv"
    file.write_text("prompt,first,second\nOne?,a,b\nTwo?,c,d\n")
    label.callback(ledger, None, str(file), None, "127.0.0.1", 0)
    assert "pairs  2\n" in capsys.readouterr().out
    assert [(pair.prompt, pair.first, pair.second) for pair in pairs] == [
        ((Message("user", "One?"),), "a", "b"),
        ((Message("user", "Two?"),), "c", "d"),
    ]


def test_how_a_policy_called_tools_is_known_from_its_training(tmp_path):
    def made(config, **ancestors):
        records = {name: {"config": one} for name, one in ancestors.items()}
        Manifest("grpo", "0" * 64, 7, config, {}, {}, {}, {}, ancestors=records).write(tmp_path)
        return tmp_path

    given = {"tools": ["a.py:f"], "max_turns": 3}
    (tmp_path / "ema").mkdir()
    made({"grpo": given})
    assert playing(tmp_path / "ema") == given  # the average has no manifest of its own
    assert playing(made({"grpo": given | {"steps": 1}}, sft={"sft": {"epochs": 1}})) == given
    sample = {"rejection.sample": given, "table": {"round": 1}}
    assert playing(made({"rejection": {"epochs": 1}}, sample=sample)) == given
    assert playing(made({"dpo": {"beta": 0.1}, "sft": None})) == {}
