"""Redaction removes secrets from a text and nothing else; a fix exists where the reader is."""

import sys

import pytest

from rlhf_pipeline.errors import DataError, install, without_secrets


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("bin/kedro", "kedro"),
        ("bin/rlhf-pipeline", "rlhf-pipeline"),
        ("lib/rlhf_pipeline/__main__.py", "python -m rlhf_pipeline"),
        ("lib/kedro/__main__.py", "kedro"),
    ],
)
def test_a_fix_names_the_program_that_the_user_started(monkeypatch, program, command):
    monkeypatch.setattr(sys, "argv", [f"/env/{program}", "rlhf", "chat"])
    error = DataError("kedro: x. Fix: `kedro run --env=a`, or `kedro rlhf clean`")
    assert error.message == f"kedro: x. Fix: `{command} run --env=a`, or `{command} rlhf clean`"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:key@host/a.jsonl?sign=key&x=1", "https://...@host/a.jsonl?..."),
        ("https://host/a.jsonl?key", "https://host/a.jsonl?..."),
        ("s3://id:ke/y@bucket/a.jsonl", "s3://...@bucket/a.jsonl"),
        ("s3://bucket/me@home/a-?.jsonl", "s3://bucket/me@home/a-?.jsonl"),
        ("data/me@home/a-?.jsonl", "data/me@home/a-?.jsonl"),
        ("postgresql://db/x?user=u&password=abc", "postgresql://db/x?..."),
        ("HTTPS://host/x?sig", "HTTPS://host/x?..."),
        ("https://h/x?next=https://y/z&sig=key, s3://b/a?.csv", "https://h/x?... s3://b/a?.csv"),
        ("mysql://me:k@y@host/db refused", "mysql://...@host/db refused"),
        ("kedro run '--params=a=https://h/x?sig=key' --env=b",
         "kedro run '--params=a=https://h/x?...' --env=b"),
        ("got https://h:80/x from me@home", "got https://h:80/x from me@home"),
        ("bad Authorization: Bearer sk-1.", "bad Authorization: Bearer ..."),
        ("{'authorization': 'Basic a2V5', 'x': 1}", "{'authorization': 'Basic ...', 'x': 1}"),
        ("found bearer sk-1, expected none", "found bearer ..., expected none"),
        ("https://h/x#access_token=key&a=b and https://h/x#install", "https://h/x#... and https://h/x#install"),
    ],
)  # fmt: skip
def test_secrets_are_not_shown(text, shown):
    assert without_secrets(text) == shown


def test_an_extra_is_installed_with_the_pins_of_a_clone_or_without_them(tmp_path, monkeypatch):
    """A project of the starter has neither constraints nor the source of the package, which is in
    no index, where a stranger's package may have its name."""
    monkeypatch.setattr(sys, "prefix", f"{tmp_path}/.venv")
    monkeypatch.chdir(tmp_path)
    assert install("tasks") == ".venv/bin/pip install 'lm-eval<0.5,>=0.4.13'"
    (tmp_path / "constraints.txt").write_text("")
    assert install("tasks") == (
        ".venv/bin/pip install --constraint constraints.txt 'lm-eval<0.5,>=0.4.13'"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a.jsonl: https://me:key@host/a?sig=key: Authorization: Bearer sk-1 refused",
         "a.jsonl: https://...@host/a?...: Authorization: Bearer ... refused"),
        # Title, erasure, colour, and the direction of writing; lines and tabs stay.
        ("columns prompt, \x1b]0;owned\x1b\\\x1b[2K\x1b[31m\r\u202e\n\tend\x9b",
         "columns prompt, \\x1b]0;owned\\x1b\\\\x1b[2K\\x1b[31m\\r\\u202e\n\tend\\x9b"),
    ],
)  # fmt: skip
def test_a_message_shows_no_secret_and_a_terminal_does_not_obey_it(text, shown):
    assert DataError(text).message == shown
