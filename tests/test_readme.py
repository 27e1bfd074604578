"""What the README prints works: each row of its table from a file of that shape, and its blocks.

A test reads the README and replaces no more than the path of the model. Its commands are in
`tests/test_documented_commands.py`.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from kedro.framework.project import pipelines
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project
from test_tutorials import PROJECT, copy_of_the_project, run

from rlhf_pipeline.commands.status import planned_rows
from rlhf_pipeline.config.stages import OPTIONAL
from rlhf_pipeline.kedro_run.checks import before_node
from rlhf_pipeline.pipelines.table import RUN, parameter_blocks
from rlhf_pipeline.runtime.manifest import NAME, content_digest
from rlhf_pipeline.runtime.program import write_manifest
from rlhf_pipeline.stages.cache.fingerprint import identify
from rlhf_pipeline.stages.job import Job, RunContext

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text()
BLOCK, FOR_PROMPTS = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PARAMETERS = "conf/local/parameters.yml"
JUDGE = re.search(r"^A judge, such as `(evaluate: .*?)`", TEXT, re.MULTILINE)[1]
ROWS = 120

SHAPES = {
    "prompt": lambda n: asked(n),
    "completion": lambda n: f"Snow number {n} is white.",
    "messages": lambda n: [
        {"role": "user", "content": asked(n)},
        {"role": "assistant", "content": f"Snow number {n} is white."},
    ],
    "chosen": lambda n: f"Snow number {n} is white.",
    "rejected": lambda n: f"Who cares about {n}?",
    "label": lambda n: n % 2 == 0,
    "question": lambda n: f"How much is {n} plus {n}?",
    "answer": lambda n: str(n + n),
}
"""A value of each column; a row of the README with another column has no file."""


def asked(n: int) -> str:
    return f"Please tell me about {n}: what colour is snow number {n}?"


@dataclass(frozen=True)
class Row:
    """A row of the table, for one pipeline and one form of file."""

    pipeline: str
    columns: tuple[str, ...]
    change: str
    """What the row says of the block."""

    def write(self, folder: Path, model: Path) -> None:
        """The files that a reader has: parameters with a model, data, and a judge."""
        text = self.parameters()
        for place in re.findall(r"(?<=[ :])/models/[\w-]+", text):
            text = text.replace(place, str(model))
        (folder / "my.py").write_text(
            "def score(prompts, responses):\n    return [len(each) for each in responses]\n"
        )
        (file,) = re.findall(r"data/01_raw/[\w.]+", text)
        data = [{name: SHAPES[name](n) for name in self.columns} for n in range(ROWS)]
        for path, content in {
            PARAMETERS: text,
            file: "".join(f"{json.dumps(row)}\n" for row in data),
        }.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)

    def parameters(self) -> str:
        """The block that the row asks for."""
        lines, change = BLOCK.splitlines(), self.change
        if change == "use the block below":
            return "\n".join([*lines[:-1], *self._for_prompts()])
        for name in re.findall(r"(?:^|, )remove `([^`]+)`", change):
            (line,) = [each for each in lines if each.startswith(name)]
            lines.remove(line)
        added = re.findall(r"(?:add |, )`([^`]+: null)`", change)
        judges = [JUDGE] if re.search(r"(?:add|,) a \[judge\]\([^)]+\)", change) else []
        rest = re.sub(
            r"remove `[^`]+`|`[^`]+: null`|a \[judge\]\([^)]+\)|nothing|add|, ", "", change
        )
        assert not rest.strip(), f"README: {change!r} says {rest!r}, which no test understands"
        return "\n".join([*lines, *added, *judges])

    def _for_prompts(self) -> list[str]:
        """The second block with the line of the pipeline in place of the first one's."""
        lines = FOR_PROMPTS.splitlines()
        first = next(n for n, line in enumerate(lines) if line.endswith("# or one of these"))
        chosen = [line.removeprefix("# ") for line in lines[first:]]
        (own,) = [line for line in chosen if line.startswith(f"{self.pipeline}:")]
        return [*lines[:first], own]


def table() -> list[Row]:
    """The rows of the README's table."""
    (start,) = re.finditer(r"^\| NAME \|.*\n\|---.*\n", TEXT, re.MULTILINE)
    rows, forms = list[Row](), list[tuple[str, ...]]()
    for line in TEXT[start.end() :].partition("\n\n")[0].splitlines():
        names, columns, change = (cell.strip() for cell in line.strip("|").split("|"))
        if columns != "the same":
            forms = [tuple(re.findall(r"`(\w+)`", form)) for form in columns.split("; or ")]
        pipelines = re.findall(r"`(\w+)`", names)
        assert pipelines and all(forms), f"README: {line!r} has no pipeline or no columns"
        rows += [Row(name, form, change) for name in pipelines for form in forms]
    return rows


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


CANNOT_ANSWER = ("rejection", "iterative_dpo")
"""They end where a random model has no right answer to train on."""


@pytest.mark.long
@rows
def test_a_row_of_the_table_runs(row: Row, model, tmp_path):
    """As printed, but for the few steps of the environment `tiny`."""
    copy_of_the_project(tmp_path)
    row.write(tmp_path, model)
    tiny = yaml.safe_load((PROJECT / "conf" / "tiny" / "parameters.yml").read_text())
    tiny |= {"grpo": tiny["ppo"], "distill": tiny["ppo"]}
    short = {"sample": {"sampling": {"max_response_tokens": 12}}}
    tiny |= dict.fromkeys(CANNOT_ANSWER, short)
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
        with pytest.raises(AssertionError, match="found 0 rows for train"):
            run(command, tmp_path)
    else:
        last = {"full": "ppo"}.get(row.pipeline, row.pipeline)
        assert f"{last}: finished" in run(command, tmp_path)
