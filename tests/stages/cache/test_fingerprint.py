"""Whatever can change a result changes its fingerprint, and nothing else does."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_pipeline.config.launch import LaunchConfig, ProgressConfig
from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.pipelines.supervised import SFT as SPEC
from rlhf_pipeline.pipelines.table import stage_specs
from rlhf_pipeline.runtime.manifest import json_digest
from rlhf_pipeline.stages.cache import fingerprint as module
from rlhf_pipeline.stages.cache.fingerprint import code_digests, identify, recipe
from rlhf_pipeline.stages.job import Job, RunContext


def job(seed: int = 1, **changes: object) -> Job:
    fields = {
        "epochs": 1,
        "batch_size": 8,
        "micro_batch_tokens": 4,
        "optimizer": {"learning_rate": 1e-3},
    }
    return Job(SPEC, {"sft": SFTConfig.model_validate(fields | changes)}, {}, seed)


def key(job: Job, digest: str = "a", processes: int = 2) -> str:
    return json_digest(recipe(job, {"demonstrations": digest}, RunContext(Path()), processes))


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
def test_each_ingredient_changes_it(other):
    assert other() != key(job())


def test_operational_parameters_do_not_change_it():
    assert key(job()) == key(job()) == key(job(log_every=50))
    assert LaunchConfig(master_port=29500).recipe() == LaunchConfig().recipe()


def test_the_answers_that_a_run_shows_do_not_change_it(tmp_path):
    def run(answers):
        progress = ProgressConfig(answers=answers)
        return identify(job(), {"demonstrations": "a"}, RunContext(tmp_path, progress=progress))

    none, five = run(0), run(5)
    assert (none.answers, five.answers) == (0, 5)
    assert none.fingerprint == five.fingerprint and none.recipe == five.recipe


def test_library_versions_change_it(monkeypatch):
    before = key(job())
    monkeypatch.setattr(module, "library_version", lambda name: "0")
    assert key(job()) != before


@pytest.mark.parametrize(
    ("changes", "library"),
    [
        ({"deepspeed": {"kernels": "liger"}}, "liger_kernel"),
        ({"deepspeed": {"kernels": "compile"}}, None),
        ({"lora": {"quantize": "nf4"}}, "bitsandbytes"),
    ],
)
def test_the_package_of_a_parameter_counts(monkeypatch, changes, library):
    monkeypatch.setattr(module, "library_version", lambda name: "1")
    found = recipe(job(**changes), {}, RunContext(Path()), 2)["versions"].keys()
    assert found - {*SPEC.libraries} == ({library} if library else set())


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """The file that remembers parsed modules, without what this process knows."""
    monkeypatch.setattr(module, "MEMORY", tmp_path / "memory.json")
    module._memory.cache_clear()
    yield module.MEMORY
    module._memory.cache_clear()


@pytest.fixture
def package(tmp_path, monkeypatch, memory):
    """A package of three modules: a imports b inside a function, c imports nothing."""
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


def test_imported_code_counts_and_neither_comments_nor_other_code(package):
    before = code_digests("rlhf_pipeline.a")
    (package / "c.py").write_text("x = 2\n")
    (package / "sub" / "b.py").write_text("# why\ndef g():\n\n    return 1\n")
    assert code_digests("rlhf_pipeline.a") == before
    (package / "sub" / "b.py").write_text("def g():\n    return 2\n")
    assert code_digests("rlhf_pipeline.a") != before


def test_a_module_is_parsed_by_one_process_only(package, memory, monkeypatch):
    before = code_digests("rlhf_pipeline.a")
    module._memory.cache_clear()  # as in a new process
    with monkeypatch.context() as context:
        context.setattr(module.ast, "parse", None)
        assert code_digests("rlhf_pipeline.a") == before
        context.setattr(module, "OWN_CODE", b"another way to parse")
        with pytest.raises(TypeError):
            code_digests("rlhf_pipeline.a")


@pytest.mark.parametrize("text", ["", '{"a', "null", "[]"])
def test_a_damaged_memory_is_made_again(package, memory, text):
    before, stored = code_digests("rlhf_pipeline.a"), memory.read_text()
    memory.write_text(text)
    module._memory.cache_clear()
    assert code_digests("rlhf_pipeline.a") == before and memory.read_text() == stored


def test_without_a_writable_folder_there_is_no_memory(package, memory, monkeypatch):
    before = code_digests("rlhf_pipeline.a")
    monkeypatch.setattr(module, "MEMORY", memory / "absent" / "memory.json")
    module._memory.cache_clear()
    assert code_digests("rlhf_pipeline.a") == before


def test_modules_imported_by_a_computed_name_count_with_their_imports(package):
    (package / "d.py").write_text("from rlhf_pipeline import c\n")
    before = code_digests("rlhf_pipeline.a", "rlhf_pipeline.d")
    assert before != code_digests("rlhf_pipeline.a")
    (package / "c.py").write_text("x = 2\n")
    assert code_digests("rlhf_pipeline.a", "rlhf_pipeline.d") != before


def test_a_job_s_modules_change_its_fingerprint():
    assert key(replace(job(), modules=("rlhf_pipeline.training.ppo",))) != key(job())


PROGRAMS = {spec.name: spec.program for spec in stage_specs().values()}


@pytest.mark.parametrize(
    ("file", "stages"),
    [
        ("training/ppo_update.py", {"ppo", "grpo", "distill"}),
        ("training/preferences.py", {"reward_model", "judge_model", "dpo", "kto", "iterative_dpo"}),
        ("evaluation/sample.py", {"sample"}),
        ("training/sft.py", {"sft", "rejection"}),
        ("stages/run.py", set()),
    ],
)
def test_the_code_of_a_stage_contains_what_its_program_imports(file, stages):
    assert {name for name, program in PROGRAMS.items() if file in code_digests(program)} == stages


def test_programs_import_by_absolute_names():
    """Relative imports are not followed."""
    files = {file for program in PROGRAMS.values() for file in code_digests(program)}
    assert [file for file in files if "\nfrom ." in (module.ROOT / file).read_text()] == []
