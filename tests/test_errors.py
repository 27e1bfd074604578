"""Redaction removes secrets from a text and nothing else; a fix exists where the reader is."""

import sys

import pytest

from rlhf_pipeline.errors import install, without_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:key@host/a.jsonl?sign=key&x=1", "https://...@host/a.jsonl?..."),
        ("https://host/a.jsonl?key", "https://host/a.jsonl?..."),
        ("s3://id:ke/y@bucket/a.jsonl", "s3://...@bucket/a.jsonl"),
        ("s3://bucket/me@home/a-?.jsonl", "s3://bucket/me@home/a-?.jsonl"),
        ("data/me@home/a-?.jsonl", "data/me@home/a-?.jsonl"),
        ("mysql://me:k@y@host/db refused", "mysql://...@host/db refused"),
        (
            "kedro run '--params=a=https://h/x?sig=key' --env=b",
            "kedro run '--params=a=https://h/x?...' --env=b",
        ),
        ("got https://h:80/x from me@home", "got https://h:80/x from me@home"),
    ],
)
def test_secrets_are_not_shown(text, shown):
    assert without_secrets(text) == shown


def test_an_extra_is_installed_with_the_pins_of_a_clone_or_without_them(tmp_path, monkeypatch):
    """A project of the starter has neither constraints nor the source of the package."""
    monkeypatch.setattr(sys, "prefix", f"{tmp_path}/.venv")
    monkeypatch.chdir(tmp_path)
    assert install("tasks") == ".venv/bin/pip install 'rlhf-pipeline[tasks]'"
    (tmp_path / "constraints.txt").write_text("")
    assert install("tasks") == (
        ".venv/bin/pip install --constraint constraints.txt 'rlhf-pipeline[tasks]'"
    )
