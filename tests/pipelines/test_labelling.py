"""`kedro rlhf label`: people compare answers, and their votes become comparisons."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pytest
from browser import chromium, press, text
from conftest import PROJECT, end_group
from ports import reserved_port
from selenium.webdriver.common.keys import Keys
from transformers import AutoTokenizer
from waiting import wait_until

pytestmark = pytest.mark.slow
VOTES = ["1", "2", "1", "2", "3", "1", "4", "2", Keys.ARROW_LEFT, Keys.ARROW_RIGHT]
"""Eight preferences and two ties."""


@contextmanager
def labelling(project, port, *arguments):
    """A server by the command line; yields what it printed. It is killed at the end."""
    kedro = str(Path(sys.executable).with_name("kedro"))
    settings = {"PYTHONPATH": str(PROJECT / "src"), "MLFLOW_TRACKING_URI": project.uri}
    server = subprocess.Popen(
        [kedro, "rlhf", "label", *arguments, f"--port={port}", "--env=tiny",
         f"--params=root={json.dumps(str(project.root))}"],
        cwd=PROJECT, env=os.environ | settings, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        printed = [server.stdout.readline() for _ in range(3)]

        def answers():
            assert server.poll() is None, printed
            with suppress(OSError):  # nothing listens yet
                return urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=10).read()

        wait_until(answers)
        yield "".join(printed)
    finally:
        end_group(server)


def vote(page, keys, done):
    """Press keys, each when the page shows the votes before it."""
    for number, key in enumerate(keys, start=done):
        wait_until(lambda number=number: text(page, "count") == f"Ann: {number} of 10")
        press(page, key)
    wait_until(lambda: text(page, "count") == f"Ann: {done + len(keys)} of 10")


def test_ten_votes_become_comparisons_in_spite_of_a_killed_server(new_project, tmp_path):
    project = new_project(tmp_path / "data")
    rows = [
        {"prompt": f"What is {n}?", "first": f"It is {n}.", "second": f"No idea what {n} is."}
        for n in range(10)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    votes = project.root / "01_raw" / "votes.jsonl"
    pairs = f"--pairs={tmp_path / 'pairs.jsonl'}"
    with reserved_port() as port, chromium() as page:
        with labelling(project, port, pairs) as printed:
            assert printed == f"page   http://127.0.0.1:{port}\nvotes  {votes}\npairs  10\n"
            page.get(f"http://127.0.0.1:{port}/?annotator=Ann")
            vote(page, VOTES[:5], 0)
        press(page, "1")  # nobody is there
        wait_until(lambda: text(page, "status").startswith("Not saved: "))
        with labelling(project, port, pairs):
            page.refresh()
            vote(page, VOTES[5:], 5)
    lines = [json.loads(line) for line in votes.read_bytes().splitlines()]
    assert [line["prompt"][0]["content"] for line in lines] == [row["prompt"] for row in rows]

    shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    page = (PROJECT / "docs" / "labelling.md").read_text()
    (documented,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    parameters = documented.replace("data/tiny/01_raw/votes.jsonl", str(votes))
    (tmp_path / "conf" / "local" / "parameters.yml").write_text(parameters)
    sizes = "split.validation_fraction=0.2,reward_model.batch_size=4"
    project.kedro("--to-nodes=split", f"--conf-source={tmp_path / 'conf'}", params=sizes)
    split = project.newest("03_split/split")
    report = json.loads((split / "report.json").read_text())["sources"]["files (votes.jsonl)"]
    assert report["rows"] == 10
    assert report["skipped"] == {"the two answers have the same score": 2}
    tokenizer = AutoTokenizer.from_pretrained(project.newest("02_base_model/base_model"))
    table = pa.ipc.open_stream(split / "reward_model" / "train.arrow").read_all()
    chosen, rejected = (
        [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
        for ids in (table["chosen_ids"].to_pylist(), table["rejected_ids"].to_pylist())
    )
    trained = {*zip(chosen, rejected, strict=True)}
    # Of the eight, one is held out for the test and two for the validation.
    assert len(trained) == 5
    assert trained <= {
        (line["first"], line["second"])[:: line["first_score"] - line["second_score"]]
        for line in lines
        if line["first_score"] != line["second_score"]
    }


def test_an_alias_stands_for_the_newest_evaluation_of_the_policy(project):
    evaluation = project.newest("08_reporting/evaluation")
    output = f"--output={evaluation.parent}/v"
    with reserved_port() as port, labelling(project, port, "candidate", output):
        state = urllib.request.urlopen(f"http://127.0.0.1:{port}/state?annotator=Ann").read()
    answers = [json.loads(line) for line in (evaluation / "answers.jsonl").read_text().splitlines()]
    first = json.loads(state)["pair"]
    paired = [answer for answer in answers if answer["policy"] != "sft_again"]
    prompts = [answer for answer in paired if answer["messages"] == first["prompt"]]
    assert sorted(first["answers"]) == sorted(answer["response"] for answer in prompts)
    assert "use either EVALUATION or --pairs" in project.kedro(command="rlhf label", check=False)
