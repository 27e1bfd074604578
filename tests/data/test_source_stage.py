"""Stage `source`, launched as a program: a source is read again only if its identity changed."""

import json
import shutil
from pathlib import Path

import pytest

import rlhf_pipeline
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.data import source as module
from rlhf_pipeline.data.record_files import example_rows, examples
from rlhf_pipeline.data.records import RowCounts
from rlhf_pipeline.pipelines.preparation import source_job
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, json_digest
from rlhf_pipeline.stages.cache import fingerprint
from rlhf_pipeline.stages.cache.fingerprint import code_digests
from rlhf_pipeline.stages.job import RunContext, StageListener
from rlhf_pipeline.stages.run import StageRunner


class Reused(StageListener, list):
    """Of each stage, whether its result was reused."""

    def stage_started(self, run):
        self.append(run.cached)


def pair(prompt="Why?", chosen="Because.", rejected="No."):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def reused():
    return Reused()


@pytest.fixture
def read_source(tmp_path, reused):
    """Runs stage `source`; returns the folder of its records."""
    context = RunContext(tmp_path / "workspace", LaunchConfig(processes=1), listener=reused)

    return lambda **config: StageRunner(context).run(source_job(SourceConfig(**config), 0))


def test_a_source_becomes_records_and_counts(tmp_path, read_source):
    rows = [pair(), pair(chosen=""), pair("How?", "No."), *[pair(chosen=" ")] * 5, pair("Who?")]
    path = write(tmp_path / "own.jsonl", *rows)
    folder = read_source(name="files", path=str(path))
    (batch,) = examples(folder).to_batches()
    read = [(row["id"], row["prompt"][0]["content"]) for row in example_rows(batch)]
    assert read == [("own.jsonl:1", "Why?"), ("own.jsonl:9", "Who?")]
    assert RowCounts.read(folder) == RowCounts(
        rows=9,
        bad={"the chosen answer is empty": 6, "the two answers are equal": 1},
        first_bad=[
            ("own.jsonl:2", "the chosen answer is empty"),
            ("own.jsonl:3", "the two answers are equal"),
            *((f"own.jsonl:{line}", "the chosen answer is empty") for line in (4, 5, 6)),
        ],
    )
    assert Manifest.read(folder).metrics == {
        "source/rows": 9,
        "source/bad_rows": 7,
        "source/skipped_rows": 0,
    }


@pytest.mark.slow
def test_only_the_source_whose_bytes_changed_is_read_again(tmp_path, read_source, reused):
    one, two = write(tmp_path / "one.jsonl", pair("a")), write(tmp_path / "two.jsonl", pair("b"))

    def both():
        reused.clear()
        return [read_source(name="files", path=str(path)) for path in (one, two)]

    first, kept = both()
    assert reused == [False, False]
    assert both() == [first, kept]
    assert reused == [True, True]
    # Other bytes, same records: the source is read again, but its content digest is unchanged.
    one.write_text(one.read_text().replace('": "', '":   "'))
    again, _ = both()
    assert reused == [False, True]
    assert again != first
    assert content_digest(again) == content_digest(first)
    # Other records, of the same size in bytes.
    one.write_text(one.read_text().replace("Because.", "because."))
    other, _ = both()
    assert reused == [False, True]
    assert content_digest(other) != content_digest(first)


def test_the_folder_of_a_file_does_not_count(tmp_path, read_source, reused):
    (tmp_path / "elsewhere").mkdir()
    path = write(tmp_path / "own.jsonl", pair())
    before = read_source(name="files", path=str(path))
    moved = shutil.move(path, tmp_path / "elsewhere")
    assert read_source(name="files", path=str(moved)) == before
    assert reused == [False, True]


COMMIT, OTHER_COMMIT = "1" * 40, "2" * 40


def key(seed=0, **config):
    job = source_job(SourceConfig(**config), seed)
    assert job.inputs == {}
    recipe = fingerprint.recipe(job, job.identities, RunContext(Path()), 1)
    return json_digest(recipe)


def test_the_commit_decides_and_the_seed_does_not():
    before = key(name="Anthropic/hh-rlhf", revision=COMMIT)
    assert key(name="Anthropic/hh-rlhf", revision=COMMIT, seed=1) == before
    assert key(name="Anthropic/hh-rlhf", revision=OTHER_COMMIT) != before
    assert key(name="Anthropic/hh-rlhf", revision=COMMIT, split="test") != before
    assert key(samples=3, seed=1) != key(samples=3, seed=2)


def test_the_commit_of_the_origin_is_read(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "read", lambda *arguments: iter(asked.append(arguments) or ()))
    config = SourceConfig(name="Anthropic/hh-rlhf", revision="v2")
    blocks = {"source": config.model_dump(mode="json")}
    module.main(LaunchedJob("source", "", 3, blocks, {}, {"revision": COMMIT}, tmp_path, 1.0))
    assert asked == [(config, 3, COMMIT)]


def test_the_code_of_an_adapter_counts_for_its_own_sources_alone(tmp_path, monkeypatch):
    package = shutil.copytree(Path(rlhf_pipeline.__file__).parent, tmp_path / "rlhf_pipeline")
    monkeypatch.setattr(fingerprint, "ROOT", package)
    mapped = {"Anthropic/hh-rlhf", "tatsu-lab/alpaca", "nvidia/HelpSteer2"}

    def keys():
        of_hub = {name: key(name=name, revision=COMMIT) for name in mapped}
        return of_hub | {"synthetic": key(samples=3)}

    def changed(module, line="_CHANGED = True"):
        before = keys()
        with (package / module).open("a") as source:
            source.write(f"\n{line}\n")
        return {name for name, now in keys().items() if now != before[name]}

    assert changed("data/sources/column_maps.py") == mapped
    assert changed("data/sources/column_maps.toml", "changed = true") == mapped
    assert changed("data/sources/column_maps.toml", "# a comment") == set()
    assert changed("data/sources/synthetic.py") == {"synthetic"}
    assert changed("data/sources/synthetic.toml", "changed = true") == {"synthetic"}
    assert changed("data/source.py") == set(keys())
    assert changed("data/split.py") == set()


def test_the_code_of_adapters_does_not_count_for_stages_that_read_records():
    for program in ("rlhf_pipeline.data.split", "rlhf_pipeline.models.base_model"):
        assert not [name for name in code_digests(program) if name.startswith("data/sources/")]
