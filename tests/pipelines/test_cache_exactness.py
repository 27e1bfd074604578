"""A change reruns the stages that depend on it and no others; `status` predicts exactly that.

Nodes, fingerprints and cache are real; the code is fingerprinted in a copy of the package. Instead
of a launch, a few bytes are written; they differ from recipe to recipe, as trained models do.
"""

import ast
import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project
from kedro.io import CatalogProtocol

from rlhf_pipeline.commands.status import planned_rows
from rlhf_pipeline.data.records import RowCounts
from rlhf_pipeline.kedro_run import checks
from rlhf_pipeline.kedro_run.hooks import run_context
from rlhf_pipeline.pipeline_registry import register_pipelines
from rlhf_pipeline.pipelines import table
from rlhf_pipeline.runtime.manifest import Manifest, file_entries
from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.stages import run
from rlhf_pipeline.stages.cache import fingerprint
from rlhf_pipeline.stages.job import RunContext, StageRun, StageSpec
from rlhf_pipeline.stages.run import StageRunner

PROJECT = Path(__file__).parents[2]
STAGES = ["source", "base_model", "split", "sft", "reward_model", "ppo", "evaluate"]
"""Each stage depends on all earlier ones, except the base model: it comes from a folder."""

EVERY_TIME = ("register", "report")
"""Nodes that are no stages."""

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 512,
}  # fmt: skip
"""The base model, which has no weights here; the sizes are for its memory."""

FILES = {
    "source": ["counts"],
    "split": ["sft/rows", "reward_model/rows", "ppo/rows", "evaluation/rows"],
}


@dataclass
class World:
    """A project whose stages have all run, on a file of rows and a base model from a folder."""

    root: Path
    launched: list[str]
    unchanged: CatalogProtocol | None = None

    def catalog(self, **parameters) -> CatalogProtocol:
        """The catalog of `kedro run --params=...`."""
        source = {"name": "files", "path": str(self.root / "rows.jsonl")}
        folder = {"path": str(self.root / "folder"), "architecture": None, "vocab_size": None}
        split = {"sources": [source]} | parameters.pop("split", {})
        own = {"root": str(self.root / "data"), "base_model": folder, "split": split}
        with KedroSession.create(PROJECT, env="tiny", runtime_params=own | parameters) as session:
            return session.load_context().catalog

    def states(self, catalog) -> dict[str, str]:
        """State of each stage in `kedro rlhf status`."""
        rows = planned_rows(register_pipelines()["full"], catalog)
        return {row.stage.split()[0]: row.state for row in rows if row.stage not in EVERY_TIME}

    def run(self, catalog) -> list[str]:
        """Run the nodes; return the stages that were launched."""
        self.launched.clear()
        table.RUN["stages"] = StageRunner(run_context(catalog))
        made = {}
        for node in register_pipelines()["full"].nodes:
            if node.name not in EVERY_TIME:
                inputs = [
                    made[name] if name in made else catalog.load(name) for name in node.inputs
                ]
                made[node.outputs[0]] = node.func(*inputs)
        return list(self.launched)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    launched = []

    def write(spec: StageSpec, stage: StageRun, context: RunContext) -> None:
        launched.append(stage.stage)
        for name in FILES.get(stage.stage, ["weights"]):
            (stage.export / name).parent.mkdir(parents=True, exist_ok=True)
            (stage.export / name).write_text(stage.fingerprint)
        if stage.stage == "source":
            RowCounts().write(stage.export)
        files = file_entries(stage.export)
        Manifest(
            stage.stage, stage.fingerprint, stage.seed, {}, stage.digests, {}, {}, files
        ).write(stage.export)

    (root / "folder").mkdir()
    (root / "folder" / "config.json").write_text(json.dumps(CONFIG))
    (root / "folder" / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    (root / "folder" / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (root / "folder" / "chat_template.jinja").write_text("{{ messages }}")
    rows = [
        {"prompt": f"Question {n}?", "chosen": f"Right {n}.", "rejected": f"Wrong {n}."}
        for n in range(9)
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bootstrap_project(PROJECT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "launch", write)
        ignored = shutil.ignore_patterns("__pycache__")
        package = shutil.copytree(fingerprint.ROOT, root / "package", ignore=ignored)
        patch.setattr(fingerprint, "ROOT", package)
        world = World(root, launched)
        world.unchanged = world.catalog()
        assert sorted(world.run(world.unchanged)) == sorted(STAGES)
        yield world


@pytest.fixture(autouse=True)
def _recipes_without_a_change_are_the_last_ones_used(world):
    """`status` compares with them."""
    assert world.run(world.unchanged) == []


def agree(world: World, catalog, first: str | None, changed: set[str]) -> None:
    """All stages from `first` on rerun: those in `changed` surely, the others for their inputs.

    The base model does not depend on the source.
    """
    affected = STAGES[STAGES.index(first) :] if first else []
    affected = [stage for stage in affected if (first, stage) != ("source", "base_model")]
    states = world.states(catalog)
    assert {stage: state for stage, state in states.items() if state != "finished"} == {
        stage: "run" if stage in changed else "may run" for stage in affected
    }
    assert sorted(world.run(catalog)) == sorted(affected)


@pytest.mark.parametrize(
    ("first", "parameters"),
    [
        ("base_model", {"seed": 7}),  # reading files uses no random numbers
        ("split", {"split": {"validation_fraction": 0.2}}),
        ("sft", {"sft": {"optimizer": {"learning_rate": 2e-3}}}),
        ("reward_model", {"reward_model": {"optimizer": {"learning_rate": 2e-3}}}),
        ("ppo", {"ppo": {"kl": {"coef": 0.2}}}),
        ("ppo", {"ppo": {"sampling": {"max_response_tokens": 11}}}),
        ("evaluate", {"evaluate": {"prompts": 23}}),
        ("sft", {"launch": {"processes": 1}}),  # the number of ranks, of the distributed stages
    ],
    ids=str,
)
def test_a_parameter_reruns_its_stage_and_all_downstream(world, first, parameters):
    """Seed and ranks are in the recipes of all of them."""
    of_all = parameters.keys() & {"seed", "launch"}
    changed = set(STAGES[STAGES.index(first) :]) if of_all else {first}
    agree(world, world.catalog(**parameters), first, changed)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"sft": {"log_every": 3, "checkpoint_every": 2}},
        {"reward_model": {"log_every": 3}},
        {"ppo": {"log_every": 3, "checkpoint_every": 2}},
        {"launch": {"master_port": 29511, "wait": False, "hang_timeout_s": 9.0,
                    "collective_timeout_s": 99.0}},
        {"launch": {"continue_from": 2}},
        {"split": {"max_bad_fraction": 0.5}},
        {"register": {"model": "another", "max_task_drop": 0.2}},
    ],
    ids=str,
)  # fmt: skip
def test_a_parameter_that_changes_no_result_reruns_nothing(world, monkeypatch, parameters):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    agree(world, world.catalog(**parameters), None, set())


def test_auto_is_the_recipe_with_its_number(world, monkeypatch):
    """8 rows of 768 tokens on each rank; with less memory, the recipe is another one."""
    automatic = {"sft": {"micro_batch_tokens": "auto"}}
    world.run(world.catalog(sft={"micro_batch_tokens": 8192}))
    agree(world, world.catalog(**automatic), None, set())
    scarce = Hardware(2, main_memory=2 * 360 * 2**20)
    monkeypatch.setattr(checks, "hardware_at_hand", lambda launch: scarce)
    catalog = world.catalog(**automatic, launch={"memory_check": "off"})
    assert catalog.load("params:sft").micro_batch_tokens == 2048
    agree(world, catalog, "sft", {"sft"})


def test_one_byte_of_a_source_file_reruns_all_stages_but_the_base_model(world):
    file = world.root / "rows.jsonl"
    before = file.read_bytes()
    file.write_bytes(before.replace(b"Right 3", b"Right 4"))
    agree(world, world.catalog(), "source", {"source"})
    moved = world.root / "elsewhere" / "rows.jsonl"
    moved.parent.mkdir()
    moved.write_bytes(before)
    sources = [{"name": "files", "path": str(moved)}]
    agree(world, world.catalog(split={"sources": sources}), None, set())
    file.write_bytes(before)
    agree(world, world.catalog(), None, set())


def test_one_byte_of_the_base_model_s_folder_reruns_all_stages_but_the_source(world):
    file = world.root / "folder" / "chat_template.jinja"
    file.write_text("{{ messages }};")
    agree(world, world.catalog(), "base_model", {"base_model"})
    file.write_text("{{ messages }}")
    agree(world, world.catalog(), None, set())


def test_an_edited_file_of_a_task_is_done_again_by_both_policies(world):
    """The task, its data, and the module of its function."""
    pytest.importorskip("lm_eval", reason="the extra `tasks` is not installed")

    def agree_on(evaluate: str) -> None:
        catalog = world.catalog(evaluate=tasks)
        states = {
            name: state for name, state in world.states(catalog).items() if state != "finished"
        }
        assert states == {"tasks": "run", "evaluate": evaluate}
        assert world.run(catalog) == ["tasks", "tasks", "evaluate"]

    folder = world.root / "tasks"
    folder.mkdir()
    files = {"own.yaml": "data_files: own.jsonl\nprocess: !function own.f", "own.jsonl": "{}",
             "own.py": "def f(documents): ..."}  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text)
    tasks = {"tasks": {"names": [str(folder / "own.yaml")]}}
    agree_on("run")
    for name, text in files.items():
        (folder / name).write_text(f"{text} ")
        agree_on("may run")
    tasks["tasks"]["batch_size_per_gpu"] = 4
    agree_on("run")


DOCSTRING = (r'"""', '"""Reworded: ')
RERUNS_NOTHING = {
    "docstring of a program": ("training/ppo.py", *DOCSTRING),
    "comment and blank line": ("rl/losses.py", r"\n    return ", "\n\n    # Text.\n    return "),
    "launcher": ("stages/launch/launcher.py", r"\Z", "CHANGED = True\n"),
    "hooks": ("kedro_run/hooks.py", r"\Z", "CHANGED = True\n"),
    "checks": ("kedro_run/checks.py", r"\Z", "CHANGED = True\n"),
    "registry": ("pipelines/table.py", r"OWN = \{", "OWN = {'another': None,"),
    "fields of a spec": ("pipelines/ppo.py", r"headline_metrics=\(", 'headline_metrics=("x",'),
    "program of another pipeline": ("training/dpo.py", r"\Z", "CHANGED = True\n"),
}
"""File, pattern and replacement of changes to the code that change no result of `full`."""

TRAINED = {"sft", "reward_model", "ppo"}
RERUNS = {
    "sources": ("data/sources/registry.py", r"\Z", "CHANGED = True\n", {"source"}),
    "chat template": (
        "data/template.py", "Assistant:", "Answer:",
        {"base_model", "split", "ppo", "evaluate"},  # further judges
    ),
    "losses": ("rl/losses.py", "return -", "return -2 * ", TRAINED),
    "rewards": ("rl/rewards.py", r"\Z", "CHANGED = True\n", {"ppo", "evaluate"}),
    "masked sums": ("rl/masking.py", r"mask, x, 0\.0", "mask, x, 1.0", TRAINED | {"evaluate"}),
    "optimizer": (
        "distributed/engine.py", r"optim\.AdamW", "optim.Adam", TRAINED | {"evaluate"}
    ),
    "optimizer step": ("distributed/optimizer_step.py", r" \* world\.size", "", TRAINED),
    "program of SFT": ("training/sft.py", r"\Z", "CHANGED = True\n", {"sft"}),
    "supervised loop": (
        "training/supervised.py", r"\Z", "CHANGED = True\n", {"sft", "reward_model"}
    ),
    "program of PPO": ("training/ppo.py", r"\Z", "CHANGED = True\n", {"ppo"}),
    "parameters of PPO": ("config/ppo.py", r"\Z", "CHANGED = True\n", {"ppo"}),
    "rates": ("verdict/statistics.py", r"\Z", "CHANGED = True\n", {"reward_model", "evaluate"}),
}  # fmt: skip
"""File, pattern and replacement of changes to the code; the stages of `full` that execute it."""


@pytest.fixture
def edit():
    """Edits a file of the package until the test ends."""
    edited = {}

    def edit(name: str, pattern: str, replacement: str) -> None:
        file = fingerprint.ROOT / name
        edited[file] = file.read_text()
        text, count = re.subn(pattern, replacement, edited[file], count=1)
        assert count == 1, f"{name} does not contain {pattern}"
        ast.parse(text)
        file.write_text(text)

    yield edit
    for file, text in edited.items():
        file.write_text(text)


@pytest.mark.parametrize("change", RERUNS_NOTHING)
def test_code_that_computes_nothing_reruns_nothing(world, edit, change):
    edit(*RERUNS_NOTHING[change])
    agree(world, world.catalog(), None, set())


@pytest.mark.parametrize("change", RERUNS)
def test_code_reruns_the_stages_that_execute_it(world, edit, change):
    *replacement, stages = RERUNS[change]
    edit(*replacement)
    agree(world, world.catalog(), min(stages, key=STAGES.index), stages)


def test_a_registered_stage_reruns_nothing(world, monkeypatch, tmp_path):
    (tmp_path / "another_policy.py").write_text(
        "from dataclasses import replace\n"
        "from rlhf_pipeline.pipelines.supervised import DPO, dpo as another\n"
        "SPEC, READS = replace(DPO, name='another', blocks={}), 'split sft_model'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = table.POLICY.builtin | {"another": "another_policy"}
    monkeypatch.setattr(table, "POLICY", replace(table.POLICY, builtin=own))
    assert {"another", "evaluate_another"} <= table.stage_specs().keys()
    agree(world, world.catalog(), None, set())
