"""The pipeline `kto` by its command line: real launches on one CPU rank."""

import json
import shutil

import pyarrow as pa
import pytest
from conftest import PROJECT

from rlhf_pipeline.runtime.manifest import verify

pytestmark = pytest.mark.slow


def test_kto_learns_from_thumbs_beside_comparisons(new_project, tmp_path):
    """The thumbs are a file of TRL's unpaired preferences."""
    own = new_project(tmp_path / "data")
    thumbs = tmp_path / "thumbs.jsonl"
    thumbs.write_text(
        "".join(
            json.dumps({"prompt": f"Thing {n}?", "completion": f"It is {n}.", "label": n % 2 == 0})
            + "\n"
            for n in range(40)
        )
    )
    sources = [{"name": "synthetic", "samples": 600}, {"name": "files", "path": str(thumbs)}]
    shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    parameters = tmp_path / "conf" / "local" / "parameters.yml"
    parameters.write_text(json.dumps({"split": {"sources": sources}}))  # JSON is YAML
    conf = f"--conf-source={tmp_path / 'conf'}"
    output = own.kedro("--pipeline=kto", conf, params="launch.processes=1")
    assert "evaluate_kto: running" in output and "dpo: running" not in output
    with pa.ipc.open_stream(own.newest("03_split/split") / "kto" / "train.arrow") as stream:
        rows = stream.read_all().to_pylist()
    assert all(row["id"].startswith("thumbs.jsonl") for row in rows)
    assert {row["label"] for row in rows} == {True, False}
    verify(own.newest("06_models/kto_model"))
    (stage,) = own.recipes("kto")
    lines = [json.loads(line)["metrics"] for line in (stage / "metrics.jsonl").open()]
    # The policy starts as its reference: no KL, and every value is a half.
    first = lines[0]
    assert (first["kto/kl"], first["kto/loss"], first["kto/agreement"]) == (0.0, 0.5, 0.5)
    held_out = [line["validation/loss"] for line in lines if "validation/loss" in line]
    exported = json.loads((stage / "export" / "manifest.json").read_text())["metrics"]
    assert exported["validation/loss"] == min(held_out)
    evaluation = json.loads(
        (own.newest("08_reporting/kto_evaluation") / "evaluation.json").read_text()
    )
    assert sorted(evaluation["policies"]) == ["kto", "sft"]
    candidate = own.client().get_model_version_by_alias("rlhf-policy-tiny", "candidate")
    assert candidate.tags["rlhf.stage"] == "kto"
    page = own.newest("08_reporting/kto_evaluation.html").read_text()
    assert "<h1>KTO is" in page and "KL on mismatched pairs" in page
