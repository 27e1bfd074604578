"""Hooks: checks before a run, its name, and printed results."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from kedro.framework.hooks.manager import _NullPluginManager
from kedro.framework.project import pipelines
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project
from kedro.io import DataCatalog, MemoryDataset, Version
from kedro.pipeline import Node, Pipeline
from kedro_datasets.json import JSONDataset
from made_by_hand import REGISTRATION, artifact
from rich.console import Console

from rlhf_pipeline.cli import cli
from rlhf_pipeline.datasets.artifact import ArtifactDataset, PageDataset, StoreDataset
from rlhf_pipeline.errors import Interrupted, PipelineError
from rlhf_pipeline.kedro_run.checks import CONF, check_stores, check_values
from rlhf_pipeline.kedro_run.explain import explained_errors
from rlhf_pipeline.kedro_run.hooks import CheckHook, RecordHook, RunHook, run_name, whole_run
from rlhf_pipeline.kedro_run.results import StageSummary
from rlhf_pipeline.stages.job import RunContext, StageRun


def registration(number):
    aliases = {"candidate": number, "sft-baseline": "1"}
    return REGISTRATION | {"promoted": True, "versions": {}, "aliases": aliases}


def test_a_run_says_at_its_start_that_a_version_is_later_than_now(tmp_path):
    later = Version(None, "2931-01-01T00.00.00.000Z")
    entry = ArtifactDataset(filepath=str(tmp_path / "ppo_model"), version=later)
    entry.save(artifact(tmp_path / "export", "ppo"))
    catalog = DataCatalog({"ppo_model": entry, "store": StoreDataset(url=None)})
    assert check_stores(Pipeline([Node(lambda: None, None, "ppo_model")]), catalog) == [
        entry.clock_fault()
    ]


def test_a_run_prints_its_own_results_although_another_run_published_newer_ones(tmp_path, capsys):
    kinds = {"ppo_model": ArtifactDataset, "registration": JSONDataset}
    kinds["evaluation_page"] = PageDataset

    def catalog(save):
        version = Version(None, save)
        places = {name: str(tmp_path / name) for name in kinds}
        return DataCatalog(
            {name: kinds[name](filepath=place, version=version) for name, place in places.items()}
        )

    def made(name):
        model = artifact(tmp_path / f"made {name}", "ppo", run=name)
        given = registration(name) | {"versions": {"base_model": "1", "ppo": name}}
        return {"ppo_model": model, "registration": given, "evaluation_page": f"<p>{name}"}

    mine, theirs = catalog("2026-01-01T00.00.00.000Z"), catalog("2026-01-02T00.00.00.000Z")
    for name, result in made("8").items():
        theirs.save(name, result)
    hook = RunHook(CheckHook(), RecordHook(CheckHook()), Console())
    hook._stages, hook._outputs = RunContext(tmp_path), {}
    for name, result in (results := made("7")).items():
        mine.save(name, result)
        hook.after_node_run(outputs={name: result})
    nodes = [Node(registration, inputs="number", outputs=name, name=name) for name in results]
    hook.after_pipeline_run(run_params={"env": "tiny"}, pipeline=Pipeline(nodes), catalog=mine)
    shown = capsys.readouterr().out
    assert "compare  kedro rlhf compare sft-baseline candidate --env=tiny\n" in shown
    assert "candidate = version 7, sft-baseline = version 1 (not trained here)" in shown
    for name in ("ppo_model", "evaluation_page"):
        assert f"2026-01-01T00.00.00.000Z/{name}" in shown
    assert "version 8" not in shown and "2026-01-02" not in shown


@pytest.fixture
def said_before(loader, caplog):
    """What a run of nodes says before it starts."""

    def said_before(nodes, **changes):
        blocks = check_values(loader["parameters"] | changes)
        entries = {f"params:{name}": block for name, block in blocks.items()}
        entries |= {
            "workspace": "nowhere",
            "params:seed": 1,
            "params:policy_seed": 1,
            "parameters": {},
        }
        catalog = DataCatalog({name: MemoryDataset(value) for name, value in entries.items()})
        catalog[CONF] = MemoryDataset(loader, copy_mode="assign")
        catalog["store"] = StoreDataset(url=None)
        pipeline = Pipeline([Node(registration, "number", name, name=name) for name in nodes])
        caplog.clear()
        with caplog.at_level("INFO"):
            CheckHook().before_pipeline_run(run_params={}, pipeline=pipeline, catalog=catalog)
        return [record.getMessage() for record in caplog.records]

    return said_before


def test_without_hooks_every_parameter_of_a_node_is_in_the_catalog(tmp_path):
    """Kedro-Viz warns of each one that is missing."""
    project = Path(__file__).parents[2]
    bootstrap_project(project)
    with KedroSession.create(project, runtime_params={"root": str(tmp_path)}) as session:
        session._hook_manager = _NullPluginManager()
        catalog = session.load_context().catalog
        names = {name for each in pipelines.values() for name in each.inputs()}
        found = {name: catalog.get(name) for name in names if name.startswith("params:")}
        assert [name for name, data in found.items() if data is None] == []


@pytest.mark.parametrize(("nodes", "lines"), [(["evaluate_dpo"], 1), (["dpo", "register"], 0)])
def test_a_run_says_which_win_rates_its_prompts_can_show(nodes, lines, said_before):
    """1/2 + (1.9600 + 0.8416) / (2 * 8) = 0.6751"""
    line = "evaluate: at most 64 prompts (evaluate.prompts), which show win rates from 67.5% up"
    assert said_before(nodes, evaluate={"prompts": 64}) == [line] * lines


def test_adapters_at_the_rate_of_whole_models_are_a_warning(said_before):
    grpo = {"rewards": [{"reference": "exact"}], "actor": {"lora": {}}}
    assert said_before(["grpo"], grpo=grpo) == [
        "grpo.actor.lora: the learning rate 1e-06 is the default for whole models, and adapters "
        "need about ten times as much. Fix: set grpo.actor.optimizer.learning_rate to 1e-05"
    ]
    assert said_before(["sft"], grpo=grpo) == []


@pytest.mark.parametrize(
    ("stage", "metrics", "lines"),
    [
        ("base_model", {"base_model/has_chat_template": 0.0, "base_model/new_tokens": 3.0},
         ["base_model: found no chat template; turns are written as Human: and Assistant:",
          "base_model: found 3 added tokens without an embedding; theirs are untrained"]),
        ("base_model", {"base_model/has_chat_template": 1.0, "base_model/new_tokens": 0.0}, []),
        ("base_model", {}, []),
        ("dpo", {"learned/loss_before": 0.6931, "learned/loss_after": 0.693},
         ["dpo: it hardly learned: the loss of its first batch was 0.693 and is 0.693"]),
    ],
)  # fmt: skip
def test_what_a_stage_lacks_is_said_once_also_from_the_cache(
    stage, metrics, lines, capsys, tmp_path
):
    run = StageRun(stage, "f", 1, {}, {}, {}, tmp_path, 60.0, cached=stage == "dpo")
    StageSummary(Console(), ["base_model"], {}).stage_ended(run, "FINISHED", metrics)
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize(
    ("error", "status", "raised"),
    [
        (Interrupted("ended"), "KILLED", "ended"),
        (OSError(30, "...", "/data"), "FAILED", "/data: Read-only file system. Fix: "),
        (KeyError("x"), "FAILED", "unexpected KeyError: 'x'\nThe stack is in tracebacks/"),
    ],
)
def test_the_error_of_a_run_is_explained_once_for_mlflow_and_the_terminal(
    error, status, raised, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    hook, ends = RecordHook(CheckHook()), []
    hook.tracker = SimpleNamespace(end=lambda *end: ends.append(end))
    with pytest.raises(PipelineError) as caught, explained_errors(show_traceback=False):
        try:
            raise error
        except Exception:
            hook.on_pipeline_error(error=error)
            raise  # as Kedro does
    assert caught.value.message.startswith(raised)
    assert ends == [(status, f"**{status.capitalize()}**\n\n```\n{caught.value.message}\n```")]
    assert len([*tmp_path.rglob("*.txt")]) == ("unexpected" in raised)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "full"),
        ({"pipeline_names": ["dpo"], "env": "local"}, "dpo"),
        ({"pipeline_names": ["full"], "env": "hh-rlhf",
          "runtime_params": {"seed": 5, "ppo": {"kl": {"coef": 0.2}}, "root": "/data"}},
         "full hh-rlhf seed=5 ppo.kl.coef=0.2"),
        ({"from_nodes": ["ppo"], "env": "tiny"}, "full from ppo tiny"),
        ({"runtime_params": {"base_model": {"path": "a" * 200}}},
         f"full base_model.path={'a' * 99}"),
    ],
)  # fmt: skip
def test_the_name_says_what_the_run_is(options, name):
    assert run_name(options) == name and len(name) <= 120


@pytest.mark.parametrize(
    ("nodes", "options", "command"),
    [
        (["ppo", "evaluate"], {}, "kedro run --pipeline=full"),
        (["dpo", "evaluate_dpo"], {"env": "tiny"}, "kedro run --pipeline=dpo --env=tiny"),
        (["evaluate"], {"runtime_params": {"seed": 5}},
         "kedro run --pipeline=full --params=seed=5"),
        (["sft"], {"runtime_params": {"ppo": {"ptx": None}, "base_model": {"path": "my model"}}},
         "kedro run --pipeline=full --params='ppo.ptx=null,base_model.path=my model'"),
    ],
)  # fmt: skip
def test_the_command_for_all_stages_keeps_environment_and_parameters(nodes, options, command):
    pipeline = Pipeline([Node(lambda: 1, None, name, name=name) for name in nodes])
    assert whole_run(options, pipeline) == command
    secret = {"runtime_params": {"path": "https://me:canary@host/a?sig=canary"}}
    assert "canary" not in run_name(secret) + whole_run(secret, pipeline)


def test_the_help_of_run_names_the_sign_that_params_need():
    """Kedro's own help allows a colon, too, which Kedro refuses."""
    shown = " ".join(CliRunner().invoke(cli, ["run", "--help"]).output.split())
    assert "colon" not in shown and "Example: seed=5,ppo.steps=100" in shown
