"""What the README prints works: each row of its table from a file of that shape, and its blocks.

A test reads the README and replaces no more than the path of the model. Its commands are in
`tests/test_documented_commands.py`.
"""

import json
import shutil
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from kedro.framework.project import pipelines
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project
from readme import PARAMETERS, ROWS, Row, table
from test_tutorials import PROJECT, copy_of_the_project, run

from rlhf_pipeline.commands.status import planned_rows
from rlhf_pipeline.config.stages import OPTIONAL
from rlhf_pipeline.kedro_run.checks import before_node
from rlhf_pipeline.pipelines.table import RUN, parameter_blocks
from rlhf_pipeline.runtime.manifest import NAME, content_digest
from rlhf_pipeline.runtime.program import write_manifest
from rlhf_pipeline.stages.cache.fingerprint import identify
from rlhf_pipeline.stages.job import Job, RunContext

rows = pytest.mark.parametrize(
    "row", table(), ids=lambda row: "-".join([row.pipeline, *row.columns])
)


@dataclass(frozen=True)
class Here:
    """Runs the programs of data stages in this process: no launch takes its seconds."""

    workspace: Path

    def run(self, job: Job) -> Path:
        digests = {name: content_digest(path) for name, path in job.inputs.items()}
        run = identify(job, digests | dict(job.identities), RunContext(self.workspace))
        if not (run.export / NAME).is_file():
            run.directory.mkdir(parents=True, exist_ok=True)
            write_manifest(run, import_module(job.spec.program).main(run))
        return run.export


@pytest.fixture(scope="module")
def model(make_model):
    """An instruct model with room for the default lengths."""
    return make_model("llama", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """All rows read the same model, which is imported once."""
    return tmp_path_factory.mktemp("workspace")


@rows
def test_a_row_of_the_table_is_planned_and_its_file_is_split(
    row: Row, model, workspace, tmp_path, monkeypatch
):
    """Each stage that trains gets rows: the file of demonstrations serves SFT alone."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(PROJECT / "conf", tmp_path / "conf", ignore=shutil.ignore_patterns("local"))
    row.write(tmp_path, model)
    bootstrap_project(PROJECT)
    with KedroSession.create(PROJECT, conf_source=str(tmp_path / "conf")) as session:
        catalog = session.load_context().catalog
        pipeline = pipelines[row.pipeline]
        planned = {line.stage: line.state for line in planned_rows(pipeline, catalog)}
        RUN["stages"] = Here(workspace)
        results: dict = {}
        for node in pipeline.only_nodes("base_model", "split").nodes:
            inputs = [
                results[name] if name in results else catalog.load(name) for name in node.inputs
            ]
            results[node.outputs[0]] = node.func(*inputs)
        blocks = {name: catalog.load(f"params:{name}") for name in parameter_blocks()}
    assert {"run", "skip"} >= {*planned.values()} and planned["split"] == "run"
    nodes = {node.name for node in pipeline.nodes}
    for node in pipeline.nodes:
        if "split" in node.inputs:
            before_node(node.name, {"split": results["split"]}, nodes, blocks)
    report = json.loads((results["split"] / "report.json").read_text())
    held_out = sum(report["conversations"][part] for part in ("test", "validation"))
    assert sum(report["conversations"].values()) == ROWS and held_out == 12
    if row.pipeline == "sft":
        assert report["files"]["sft/train.arrow"]["rows"] == ROWS - held_out
        assert report["unserved"] == ["reward_model", "ppo"]


CANNOT_ANSWER = {
    "grpo": "found groups of equal scores alone",
    "rejection": "found 0 rows for train",
    "iterative_dpo": "found 0 rows for train",
}
"""How they end where a random model has no right answer to train on."""


@pytest.mark.long
@rows
def test_a_row_of_the_table_runs(row: Row, model, tmp_path):
    """As printed, but for the few steps of the environment `tiny`."""
    copy_of_the_project(tmp_path)
    row.write(tmp_path, model)
    tiny = yaml.safe_load((PROJECT / "conf" / "tiny" / "parameters.yml").read_text())
    tiny |= {"grpo": tiny["ppo"], "distill": tiny["ppo"]}
    short = {"sample": {"sampling": {"max_response_tokens": 12}}}
    tiny |= dict.fromkeys(("rejection", "iterative_dpo"), short)
    given = OPTIONAL | yaml.safe_load((tmp_path / PARAMETERS).read_text())
    few = {
        name: block
        for name, block in tiny.items()
        if name not in ("base_model", "split") and given.get(name, {}) is not None
    }
    (tmp_path / "conf" / "few").mkdir()
    (tmp_path / "conf" / "few" / "parameters.yml").write_text(yaml.safe_dump(few))
    command = f"kedro run --pipeline={row.pipeline} --env=few"
    if row.pipeline in CANNOT_ANSWER:
        with pytest.raises(AssertionError, match=CANNOT_ANSWER[row.pipeline]):
            run(command, tmp_path)
    else:
        last = {"full": "ppo"}.get(row.pipeline, row.pipeline)
        assert f"{last}: finished" in run(command, tmp_path)
