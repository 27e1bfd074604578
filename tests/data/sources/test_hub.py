"""Every source of the hub, read by `datasets` over HTTP from a stand-in hub."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stand_in_hub import COMMITS, serving

from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.data.records import Example, Message, Text
from rlhf_pipeline.data.sources.adapter import CONVERTED, Source
from rlhf_pipeline.data.sources.registry import find_source, read

pytestmark = pytest.mark.slow

READER = """
import json, sys
from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.data.sources.registry import read, source_origin

for line in sys.stdin:
    config = SourceConfig(**json.loads(line))
    try:
        commit = source_origin(config)[1]["revision"]
        records = [repr(record) for record in read(config, 0, commit)]
        print(json.dumps([commit, records]), flush=True)
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
"""
"""A separate process, since huggingface_hub reads the environment when it is imported."""


def publish(root, source, rows):
    """Writes a repository in the layout of `push_to_hub` or of the hub's conversion. Half of the
    rows are in another split, and in another subset if the source has one."""
    repository = root / source.name
    main, converted = (repository / commit for commit in COMMITS.values())
    main.mkdir(parents=True, exist_ok=True)
    half = rows[: max(1, len(rows) // 2)]
    if source.revision == CONVERTED:
        (main / f"{repository.name}.py").write_text("import datasets\n")
        folder = converted / (source.subset or "default")
        write(folder / source.split / "0000.parquet", rows)
        write(folder / "validation" / "0000.parquet", half)
        return
    folder = source.subset or "data"
    write(main / folder / f"{source.split}-00000-of-00001.parquet", rows)
    write(main / folder / "test-00000-of-00001.parquet", half)
    if source.subset is not None:
        names = "other", folder
        card = [{"config_name": name, "data_files": f"{name}/train-*"} for name in names]
        (main / "README.md").write_text(f"---\n{json.dumps({'configs': card})}\n---\n")
        write(main / "other" / "train-00000-of-00001.parquet", half)


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def ask(endpoint, home, *configurations):
    """Commit and records of each configuration, or the error, read by a process with this hub."""
    done = subprocess.run(
        [sys.executable, "-c", READER],
        input="\n".join(map(json.dumps, configurations)),
        env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [*map(json.loads, done.stdout.splitlines())]


WEBGPT, ALPACA = "openai/webgpt_comparisons", "tatsu-lab/alpaca"
WIKITEXT = "Salesforce/wikitext"
WHY = (Message("user", "Why is the sky blue?"),)
BLUE = Example(WHY, "Air scatters blue light (Rayleigh) more than red.", "Because of the sea.")
WHICH = (Message("user", "Identify the odd one out.\n\nTwitter, Instagram, Telegram"),)
ODD_ONE = Example(WHICH, "Telegram")
VALKYRIA = Text("= Valkyria =\nValkyria is a <unk> game .\nIt sold well .")
SETTINGS = [
    ({"name": WEBGPT, "subset": "default", "samples": 1}, COMMITS[CONVERTED], BLUE),
    ({"name": WIKITEXT, "subset": "other", "samples": 5}, COMMITS["main"], VALKYRIA),
    ({"name": ALPACA, "split": "test"}, COMMITS["main"], ODD_ONE),
    ({"name": "lab/pairs", "revision": CONVERTED, "subset": "default", "samples": 1,
      "columns": {"prompt": "question.full_text", "response": "quotes_0.extract.0"}},
     COMMITS[CONVERTED], Example(WHY, "Blue light is scattered most.")),
    ({"name": ALPACA, "revision": COMMITS["main"], "samples": 1}, COMMITS["main"], ODD_ONE),
]  # fmt: skip
SCRIPT = {"name": WEBGPT, "revision": "main"}
"""A repository with a loading script, which is asked for before its converted files are here."""
FAILURES = [
    (SCRIPT, "scripts are no longer supported, but found webgpt_comparisons.py"),
    ({"name": WEBGPT, "subset": "none"}, "cannot be loaded from the hub"),
    ({"name": WIKITEXT, "subset": "none"}, "BuilderConfig 'none' not found"),
    ({"name": ALPACA, "split": "none"}, 'Unknown split "none"'),
    ({"name": ALPACA, "revision": "3" * 40}, f"Revision '{'3' * 40}' doesn't exist"),
]


@pytest.fixture(scope="module")
def hub(source_rows, tmp_path_factory):
    """Address of a hub with the repositories of all sources."""
    root = tmp_path_factory.mktemp("hub")
    for name, published in source_rows.items():
        publish(root, find_source(SourceConfig(name=name)), published)
    publish(root, Source("lab/pairs", "any", revision=CONVERTED), source_rows[WEBGPT])
    with serving(root) as hub:
        yield hub.address


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Folder of the downloads."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def answers(hub, home, source_rows):
    """Results of one process for all configurations, by their JSON."""
    cases = [case[0] for case in (*SETTINGS, *FAILURES) if case[0] != SCRIPT]
    configurations = [SCRIPT, *({"name": name} for name in source_rows), *cases]
    return dict(zip(map(json.dumps, configurations), ask(hub, home, *configurations), strict=True))


def test_every_source_is_read_as_from_its_files(answers, source_rows, tmp_path):
    path = tmp_path / "rows.jsonl"
    for name, published in source_rows.items():
        source = find_source(SourceConfig(name=name))
        path.write_text("\n".join(map(json.dumps, published)))
        expected = [
            repr((f"{name}:{source.split}:{int(place.partition(':')[2]) - 1}", record))
            for place, record in read(SourceConfig(name=name, path=str(path)), 0)
        ]
        assert expected
        assert answers[json.dumps({"name": name})] == [COMMITS[source.revision or "main"], expected]


@pytest.mark.parametrize(("configuration", "commit", "record"), SETTINGS)
def test_settings(answers, configuration, commit, record):
    found, (only,) = answers[json.dumps(configuration)]
    assert found == commit
    assert only.endswith(f", {record!r})")


@pytest.mark.parametrize(("configuration", "reason"), FAILURES)
def test_requests_that_the_hub_cannot_serve(answers, configuration, reason):
    error, message = answers[json.dumps(configuration)]
    assert error == "DataError"
    assert reason in message
    assert "set the source's `path`" in message


def test_a_commit_that_was_read_before_needs_no_hub(answers, home, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    read_before = {"name": ALPACA, "revision": COMMITS["main"], "samples": 1}
    other = read_before | {"revision": "3" * 40}
    found, (error, message) = ask("http://127.0.0.1:9", home, read_before, other)
    assert found == answers[json.dumps(read_before)]
    assert error == "DataError"
    assert "the local cache contains only " + COMMITS["main"] in message
