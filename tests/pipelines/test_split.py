"""The registered pipeline `data_preparation`: each source is read once; bad rows stop the split."""

import json

import pytest
from rank_fixtures import as_artifact

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.pipelines.preparation import split as split_node
from rlhf_pipeline.stages.job import RunContext, StageListener
from rlhf_pipeline.stages.run import StageRunner

ROWS = [
    {"prompt": f"Question {n}?", "chosen": f"Right {n}.", "rejected": f"Wrong {n}."}
    for n in range(9)
]
BAD = {"prompt": "Question?", "chosen": "", "rejected": "Wrong."}


@pytest.fixture
def split(tokenizer, tmp_path):
    """Runs the node on two files and a text; returns the result and the stages of the run."""
    base_model = tmp_path / "base_model"  # the part of it that the split reads
    tokenizer.save_pretrained(base_model)
    TokenContract.of(tokenizer).write(base_model)
    as_artifact(base_model)
    for name, rows in {"one.jsonl": [*ROWS, BAD], "two.jsonl": ROWS[:2]}.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "documents.txt").write_text("A few words, more than a block of them.\n")
    one, two, text = (
        {"name": "files", "path": str(tmp_path / name)}
        for name in ("one.jsonl", "two.jsonl", "documents.txt")
    )

    def split(**changes):
        texts = {"sources": [text | {"columns": {"text": "text"}}], "block_tokens": 4}
        config = SplitConfig(
            sources=[one, two], pretraining=texts, max_prompt_tokens=200, max_response_tokens=200,
            validation_fraction=0.1, test_fraction=0.1, **changes,
        )  # fmt: skip
        started, listener = [], StageListener()
        listener.stage_started = started.append
        context = RunContext(tmp_path / "workspace", LaunchConfig(processes=1), listener=listener)
        result = split_node(base_model, config, None, 0, StageRunner(context))
        return result, [f"{run.stage} reused" if run.cached else run.stage for run in started]

    return split


@pytest.mark.slow
def test_sources_are_read_once_and_bad_rows_are_counted_every_time(split):
    message = r"source files \(one\.jsonl\): 1 of 10 rows .*\n  one\.jsonl:10: the chosen"
    with pytest.raises(DataError, match=message):
        split()
    result, stages = split(max_bad_fraction=0.1)
    assert stages == ["source reused", "source reused", "source", "split"]
    report = json.loads((result / "report.json").read_text())
    counts = [(one["rows"], one["duplicates_merged"]) for one in report["sources"].values()]
    assert counts == [(10, 0), (2, 2)]
    assert report["pretraining"]["documents"] == 1
    # The allowed fraction changes no byte: nothing is launched, but the bad rows are checked.
    assert split(max_bad_fraction=0.5) == (result, [*["source reused"] * 3, "split reused"])
    with pytest.raises(DataError, match="1 of 10 rows"):
        split(max_bad_fraction=0.09)
    # Another division does not read the sources again.
    other, stages = split(max_bad_fraction=0.1, weights=(1, 1, 1))
    assert other != result
    assert stages == [*["source reused"] * 3, "split"]
