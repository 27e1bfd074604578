"""The probe of `kedro rlhf plan`: where it writes, and what it estimates."""

import json
import shutil
from pathlib import Path

import pytest
from kedro.framework.project import pipelines
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project

from rlhf_pipeline.commands.plan import loader_of, make_plan, read
from rlhf_pipeline.commands.probe import measured_hours, short
from rlhf_pipeline.errors import ConfigError

PROJECT = Path(__file__).parents[2]
HUB = {"split": {"sources": [{"name": "Anthropic/hh-rlhf"}]}}


@pytest.fixture
def conf(tmp_path):
    """A configuration with files of the user's own."""
    return shutil.copytree(PROJECT / "conf", tmp_path / "conf")


@pytest.fixture
def catalogs(monkeypatch):
    """Catalogs of the runs that the probe starts, whose stages take a second for each step."""
    seen = []

    def run(self, pipeline_names, to_nodes):
        catalog = self.load_context().catalog
        seen.append(catalog)
        for stage in to_nodes:
            folder = Path(catalog.load("workspace")) / stage / "recipe"
            folder.mkdir(parents=True)
            lines = [{"step": n, "metrics": {"time/step_s": 1.0}} for n in range(1, 5)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))

    monkeypatch.setattr(KedroSession, "run", run)
    return seen


def probe(conf, pipeline="full", params=()):
    """The hours, and the stages of the plan."""
    bootstrap_project(PROJECT)
    parameters, _ = read(loader_of(PROJECT, "tiny", str(conf), dict(params), None))
    nodes = {node.name for node in pipelines[pipeline].nodes}
    works = make_plan(parameters, nodes).works
    return measured_hours(PROJECT, conf, "tiny", parameters, pipeline, works), works


def test_a_probe_does_not_use_the_store_for_stages(conf, catalogs, tmp_path):
    (conf / "local" / "globals.yml").write_text(f"store: {tmp_path}/store")
    hours, works = probe(conf)
    assert [catalog.load("store") for catalog in catalogs] == [None]
    assert hours == {
        stage: work.steps / 3600 for stage, work in works.items() if stage != "evaluate"
    }


@pytest.mark.parametrize("place", ["local://{}/models", "{}/models"])
def test_a_probe_that_would_publish_its_models_is_refused(conf, catalogs, tmp_path, place):
    entry = {
        "type": "rlhf_pipeline.datasets.artifact.ArtifactDataset",
        "filepath": place.format(tmp_path),
        "versioned": True,
    }
    (conf / "local" / "catalog.yml").write_text(json.dumps({"{stage}_model": entry}))
    with pytest.raises(ConfigError) as error:
        probe(conf)
    assert catalogs == []
    assert (
        f"_model: found {entry['filepath']} in the catalog, expected a path below ${{_root}}"
        in (error.value.message)
    )


def test_a_store_that_the_catalog_names_by_itself_is_refused(conf, catalogs, tmp_path):
    entry = {"type": "rlhf_pipeline.datasets.store.StoreDataset", "url": f"{tmp_path}/store"}
    (conf / "local" / "catalog.yml").write_text(json.dumps({"store": entry}))
    with pytest.raises(ConfigError, match=r"url as \$\{runtime_params:store, .*/store\}"):
        probe(conf)
    entry["url"] = "${runtime_params:store, s3://bucket/project}"
    (conf / "local" / "catalog.yml").write_text(json.dumps({"store": entry}))
    assert probe(conf)[0]


@pytest.mark.parametrize(
    ("pipeline", "known", "unknown"),
    [("dpo", [], "sft, reward_model, dpo"), ("full", ["ppo"], "sft, reward_model")],
)
def test_only_stages_with_a_known_number_of_steps_have_hours(
    conf, catalogs, capsys, pipeline, known, unknown
):
    hours, _ = probe(conf, pipeline, HUB)
    assert list(hours) == known
    assert len(catalogs) == len(known)  # else nothing is run
    assert capsys.readouterr().err.startswith(f"{unknown}: found no number of rows, without")


def test_a_pipeline_without_training_has_no_hours(conf, catalogs):
    assert probe(conf, "evaluation")[0] == {}
    assert catalogs == []


@pytest.mark.parametrize("count", [1, 3])
def test_all_stages_are_shortened_although_their_rows_are_not_known(count):
    parameters, _ = read(loader_of(PROJECT, "tiny", None, {}, None))
    sources = [{"name": "files", "path": f"{n}.jsonl", "fraction": 0.5} for n in range(count)]
    parameters["split"]["sources"] = sources
    blocks = short(parameters, ["sft", "reward_model", "dpo", "ppo"])
    rows = sum(source["samples"] * 0.5 for source in blocks["split"]["sources"])
    train = rows * (1 - 0.05 - 0.1)
    for stage, share in {"sft": 0.2, "reward_model": 0.4, "dpo": 0.4}.items():
        steps = blocks[stage]["epochs"] * train * share / blocks[stage]["batch_size"]
        assert steps == pytest.approx(4)
    assert 4 * 16 / 0.2 <= train <= 4 * 16 / 0.2 + count
    assert blocks["ppo"]["steps"] == 4
