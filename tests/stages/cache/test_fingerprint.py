"""Fingerprints: what changes a result changes them, and nothing else does."""

import json
from dataclasses import replace

import pytest

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.training import OptimizerConfig, SFTConfig
from rlhf_pipeline.stages import fingerprint as module
from rlhf_pipeline.stages.cache.fingerprint import code_digests, fingerprint, recipe
from rlhf_pipeline.stages.job import Job


def job(seed: int = 1, **changes: object) -> Job:
    fields = {
        "epochs": 1,
        "batch_size": 8,
        "micro_batch_size_per_gpu": 4,
        "optimizer": {"learning_rate": 1e-3},
    }
    return Job("sft", {"sft": SFTConfig.model_validate(fields | changes)}, {}, seed)


def key(job: Job, digest: str = "a", processes: int = 2) -> str:
    return fingerprint(recipe(job, digests={"examples": digest}, processes=processes))


def test_the_same_recipe_has_the_same_fingerprint():
    assert key(job()) == key(job())


@pytest.mark.parametrize(
    "other",
    [
        lambda: key(job(seed=2)),
        lambda: key(job(batch_size=16)),
        lambda: key(job(optimizer={"learning_rate": 2e-3})),
        lambda: key(job(), digest="b"),
        lambda: key(job(), processes=1),
    ],
    ids=["seed", "batch size", "learning rate", "input", "processes"],
)
def test_what_decides_the_result_changes_it(other):
    assert other() != key(job())


def test_the_log_interval_does_not_change_it():
    assert key(job(log_every=50)) == key(job())


def test_library_versions_change_it(monkeypatch):
    before = key(job())
    monkeypatch.setattr(module, "_version", lambda name: "0")
    assert key(job()) != before


def test_ports_are_operational():
    assert LaunchConfig(master_port=29500).recipe() == LaunchConfig().recipe()
    assert (
        OptimizerConfig(learning_rate=1.0).recipe() != OptimizerConfig(learning_rate=2.0).recipe()
    )


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `rlhf_pipeline` of three modules: a imports b inside a function, c stands alone."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "__init__.py").touch()
    (tmp_path / "sub" / "__init__.py").touch()
    (tmp_path / "a.py").write_text(
        "def f():\n    from rlhf_pipeline.sub.b import g\n    return g()\n"
    )
    (tmp_path / "sub" / "b.py").write_text("def g():\n    return 1\n")
    (tmp_path / "c.py").write_text("x = 1\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path


def test_code_that_the_program_can_execute_counts(package):
    before = code_digests("rlhf_pipeline.a")
    (package / "sub" / "b.py").write_text("def g():\n    return 2\n")
    assert code_digests("rlhf_pipeline.a") != before


def test_other_code_and_comments_do_not_count(package):
    before = code_digests("rlhf_pipeline.a")
    (package / "c.py").write_text("x = 2\n")
    (package / "sub" / "b.py").write_text("# why\ndef g():\n\n    return 1\n")
    assert code_digests("rlhf_pipeline.a") == before


def test_modules_that_are_imported_by_a_computed_name_count_with_all_that_they_import(package):
    (package / "d.py").write_text("from rlhf_pipeline import c\n")
    before = code_digests("rlhf_pipeline.a", "rlhf_pipeline.d")
    assert before != code_digests("rlhf_pipeline.a")
    (package / "c.py").write_text("x = 2\n")
    assert code_digests("rlhf_pipeline.a", "rlhf_pipeline.d") != before


def test_a_job_s_modules_change_its_fingerprint():
    assert key(replace(job(), modules=("rlhf_pipeline.training.ppo",))) != key(job())


def test_the_closure_of_sft_holds_its_math_and_not_ppo():
    closure = module._closure("rlhf_pipeline.training.sft")
    assert "rlhf_pipeline.rl.losses" in closure
    assert "rlhf_pipeline.config.block" in closure
    assert "rlhf_pipeline.training.ppo" not in closure


def test_what_was_parsed_is_remembered_by_its_text(package, tmp_path, monkeypatch):
    """A process that finds it parses nothing; a memory that is damaged, or may not be written, only costs time."""
    monkeypatch.setattr(module, "MEMORY", tmp_path / "memory" / "syntax.json")

    def digests():
        module._parsed.cache_clear()
        module._memory.cache_clear()
        found = code_digests("rlhf_pipeline.a")
        module._remember(module._memory(), 0)
        return found

    parsed = digests()
    assert len(json.loads(module.MEMORY.read_text())) == len(parsed) == 2
    with monkeypatch.context() as patch:
        patch.setattr(module.ast, "parse", None)
        assert digests() == parsed
    module.MEMORY.write_text("{")
    assert digests() == parsed
    monkeypatch.setattr(module, "MEMORY", tmp_path / "memory" / "syntax.json" / "below a file")
    assert digests() == parsed
    module._parsed.cache_clear()
    module._memory.cache_clear()
