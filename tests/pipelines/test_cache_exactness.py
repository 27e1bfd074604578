"""What is run again after a change: all that depends on it, and nothing else. The status says so, and the run does so.

The nodes, the fingerprints and the cache are real; in the place of each program a few bytes are written, which differ from
recipe to recipe as trained models do.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project
from kedro.io import CatalogProtocol

from rlhf_pipeline.commands.status import status
from rlhf_pipeline.data.row_counts import RowCounts
from rlhf_pipeline.pipeline_registry import register_pipelines
from rlhf_pipeline.runtime.manifest import Manifest, file_entries
from rlhf_pipeline.stages import run
from rlhf_pipeline.stages.cache import fingerprint
from rlhf_pipeline.stages.events import StageRun

PROJECT = Path(__file__).parents[2]
STAGES = ["source", "base_model", "split", "sft", "reward_model", "ppo", "evaluate"]
"""Each reads, directly or not, what all before it have made; but for the base model, which comes from a folder here."""

FILES = {
    "source": ["counts"],
    "split": ["sft/rows", "reward_model/rows", "ppo/rows", "evaluation/rows"],
}


@dataclass
class World:
    """A project whose stages have all run, on a file of rows and a base model in a folder."""

    root: Path
    launched: list[str]
    unchanged: CatalogProtocol | None = None

    def catalog(self, **parameters) -> CatalogProtocol:
        """The catalog as `kedro run --params=...` has it."""
        source = {"name": "files", "path": str(self.root / "rows.jsonl")}
        folder = {"path": str(self.root / "folder"), "architecture": None, "vocab_size": None}
        split = {"sources": [source]} | parameters.pop("split", {})
        own = {"root": str(self.root / "data"), "base_model": folder, "split": split}
        with KedroSession.create(PROJECT, env="tiny", runtime_params=own | parameters) as session:
            return session.load_context().catalog

    def states(self, catalog) -> dict[str, str]:
        """What `kedro rlhf status` says of each stage that trains or prepares anything."""
        rows = status(register_pipelines()["full"], catalog)
        return {row.stage.split()[0]: row.state for row in rows if row.stage != "register"}

    def run(self, catalog) -> list[str]:
        """Run the nodes; return the stages that were launched."""
        self.launched.clear()
        made = {}
        for node in register_pipelines()["full"].nodes:
            if node.name != "register":
                inputs = [
                    made[name] if name in made else catalog.load(name) for name in node.inputs
                ]
                made[node.outputs[0]] = node.func(*inputs)
        return list(self.launched)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    launched = []

    def write(program: object, job_file: Path, stage: StageRun, *_: object) -> None:
        launched.append(stage.stage)
        for name in FILES.get(stage.stage, ["weights"]):
            (stage.export / name).parent.mkdir(parents=True, exist_ok=True)
            (stage.export / name).write_text(stage.fingerprint)
        if stage.stage == "source":
            RowCounts().write(stage.export)
        files = file_entries(stage.export)
        Manifest(stage.stage, stage.fingerprint, stage.seed, {}, stage.inputs, {}, {}, files).write(
            stage.export
        )

    (root / "folder").mkdir()
    (root / "folder" / "chat_template.jinja").write_text("{{ messages }}")
    rows = [
        {"prompt": f"Question {n}?", "chosen": f"Right {n}.", "rejected": f"Wrong {n}."}
        for n in range(9)
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bootstrap_project(PROJECT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "launch", write)
        world = World(root, launched)
        world.unchanged = world.catalog()
        assert sorted(world.run(world.unchanged)) == sorted(STAGES)
        yield world


@pytest.fixture(autouse=True)
def _the_recipes_used_last_are_those_without_a_change(world):
    """Which a status compares with."""
    assert world.run(world.unchanged) == []


def agree(world: World, catalog, first: str | None, changed: set[str]) -> None:
    """The stages from `first` on are run again; those in `changed` for a reason of their own."""
    affected = STAGES[STAGES.index(first) :] if first else []
    affected = [stage for stage in affected if first != "source" or stage != "base_model"]
    states = world.states(catalog)
    assert {stage: state for stage, state in states.items() if state != "finished"} == {
        stage: "run" if stage in changed else "may run" for stage in affected
    }
    assert sorted(world.run(catalog)) == sorted(affected)


@pytest.mark.parametrize(
    ("first", "parameters"),
    [
        ("base_model", {"seed": 7}),  # files are read without chance
        ("split", {"split": {"validation_fraction": 0.2}}),
        ("split", {"split": {"max_prompt_tokens": 65}}),
        ("sft", {"sft": {"epochs": 2}}),
        ("sft", {"sft": {"optimizer": {"learning_rate": 2e-3}}}),
        ("reward_model", {"reward_model": {"optimizer": {"learning_rate": 2e-3}}}),
        ("ppo", {"ppo": {"kl": {"coef": 0.2}}}),
        ("ppo", {"ppo": {"sampling": {"max_response_tokens": 11}}}),
        ("ppo", {"ppo": {"critic": {"deepspeed": {"zero_stage": 2}}}}),
        ("evaluate", {"evaluate": {"prompts": 23}}),
    ],
    ids=str,
)
def test_a_parameter_runs_its_stage_and_what_follows(world, first, parameters):
    changed = set(STAGES[STAGES.index("base_model") :]) if "seed" in parameters else {first}
    agree(world, world.catalog(**parameters), first, changed)


def test_the_number_of_ranks_runs_what_is_distributed(world):
    agree(
        world,
        world.catalog(launch={"processes": 1}),
        "sft",
        {"sft", "reward_model", "ppo", "evaluate"},
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"sft": {"log_every": 3, "checkpoint_every": 2}},
        {"reward_model": {"log_every": 3}},
        {"ppo": {"log_every": 3, "checkpoint_every": 2}},
        {
            "launch": {
                "master_port": 29511,
                "wait": False,
                "hang_timeout_s": 9.0,
                "collective_timeout_s": 99.0,
            }
        },
        {"launch": {"halve_micro_batch_on_oom": True, "continue_from": 2}},
        {"split": {"max_bad_fraction": 0.5}},
        {"register": {"model": "another"}},
    ],
    ids=str,
)
def test_what_changes_no_result_runs_nothing(world, monkeypatch, parameters):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    agree(world, world.catalog(**parameters), None, set())


def test_one_byte_of_a_source_s_file_runs_all_that_its_rows_reach(world):
    """The base model comes from its folder, whatever the rows are."""
    file = world.root / "rows.jsonl"
    before = file.read_bytes()
    file.write_bytes(before.replace(b"Right 3", b"Right 4"))
    agree(world, world.catalog(), "source", {"source"})
    moved = world.root / "elsewhere" / "rows.jsonl"
    moved.parent.mkdir()
    moved.write_bytes(before)
    agree(
        world,
        world.catalog(split={"sources": [{"name": "files", "path": str(moved)}]}),
        None,
        set(),
    )
    file.write_bytes(before)
    agree(world, world.catalog(), None, set())


def test_one_byte_of_the_chat_template_runs_all_that_have_prompts(world):
    file = world.root / "folder" / "chat_template.jinja"
    file.write_text("{{ messages }};")
    agree(world, world.catalog(), "base_model", {"base_model"})
    file.write_text("{{ messages }}")
    agree(world, world.catalog(), None, set())


@pytest.mark.parametrize(
    ("module", "first", "changed"),
    [
        ("data/sources/own_files.py", "source", {"source"}),
        ("data/template.py", "base_model", {"base_model", "split", "ppo"}),
        ("data/parts.py", "split", {"split"}),
        ("training/sft.py", "sft", {"sft"}),
        ("training/supervised.py", "sft", {"sft", "reward_model"}),
        ("training/pairs.py", "reward_model", {"reward_model"}),
        ("rl/advantages.py", "ppo", {"ppo", "evaluate"}),
        ("training/ppo.py", "ppo", {"ppo"}),
        ("evaluation/statistics.py", "evaluate", {"evaluate"}),
        ("training/dpo.py", None, set()),
        ("stages/launch/launcher.py", None, set()),
        ("tracking/runs.py", None, set()),
        ("hooks.py", None, set()),
    ],
)
def test_one_byte_of_a_module_runs_the_stages_whose_programs_import_it(
    world, monkeypatch, tmp_path, module, first, changed
):
    shutil.copytree(
        fingerprint.ROOT, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__")
    )
    file = tmp_path / "package" / module
    file.write_bytes(file.read_bytes() + b"0")
    monkeypatch.setattr(fingerprint, "ROOT", tmp_path / "package")
    agree(world, world.catalog(), first, changed)
