"""`ppo.generator: auto`: what the ranks choose, that all choose alike, and that they say why.

The GPU and the package are stand-ins; `test_vllm_generator.py` chooses the real vLLM, on the CPU.
"""

import json
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
from ppo_runs import ppo_config, run_ppo

from rlhf_pipeline.config.training import SamplingConfig, TrainedModelConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.errors import ConfigError, StageError
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.rollout import chosen_generator, vllm_generator
from rlhf_pipeline.rollout.generation import load_generator
from rlhf_pipeline.rollout.transformers_generator import TransformersGenerator
from rlhf_pipeline.runtime.job import LaunchedJob

CASES = {
    "a GPU on the first of two ranks": ((True, False), "rank 1 has no GPU"),
    "no GPU": ((False, False), "rank 0 has no GPU"),
    "an engine on the first of two ranks": ((True, True), "vLLM makes no engine"),
}


class Fast:
    """Stands for vLLM's generator."""

    def __init__(self, policy, contract, *, rows, longest, place):
        self.arguments = rows, longest, place


@pytest.fixture
def gpus(monkeypatch):
    """A rank with a GPU, the package vLLM, and a generator of its own."""
    monkeypatch.setattr(chosen_generator, "on_gpu", lambda: True)
    monkeypatch.setattr(chosen_generator, "find_spec", lambda name: name)
    monkeypatch.setattr(chosen_generator, "make_engine", lambda *_, **__: None, raising=False)
    monkeypatch.setattr(chosen_generator, "VLLMGenerator", Fast)


def load(folder, world, directory, *, versions=(("vllm", "0.32.0"),), begun=None, **reasons):
    """The generator that `auto` becomes, and what the job notes."""
    config = TrainedModelConfig.model_validate({"optimizer": {"learning_rate": 1e-2}})
    engine = train_engine(partial(load_policy, folder), config, 2)
    job = LaunchedJob("ppo", "f", 1, {}, {}, {}, directory, 60.0, dict(versions), resume_from=2)
    generator = load_generator(
        "auto", SamplingConfig(batch_size_per_gpu=3), lambda: 40, policy=engine, world=world,
        contract=TokenContract.read(folder), gather=True, place="ppo.generator", job=job,
        begun=begun, **{"refused": None, "later": 0} | reasons,
    )  # fmt: skip
    return generator, job.choices["ppo.generator"]


def case(lab, gpus, reason):
    """The choices of both ranks, and how many computed with vLLM, which they can only together."""

    def make(*_):
        if lab.world.rank == 1:
            raise ConfigError("vLLM makes no engine. Fix: set it to transformers")

    parity = mock.Mock(return_value=True)
    with (
        mock.patch.multiple(
            chosen_generator, on_gpu=lambda: gpus[lab.world.rank], find_spec=lambda name: name
        ),
        mock.patch.multiple(vllm_generator, _ENGINES={}, load_engine=make, has_parity=parity),
    ):
        _, choice = load(lab.models["llama"], lab.world, lab.folder)
    return lab.world.gather([choice, parity.called])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_choose_alike(cells, name):
    choice = {"value": "transformers", "reason": CASES[name][1]}
    assert cells[name] == 2 * [[choice, False]]


def test_vllm_answers_where_nothing_speaks_against_it(policy, world, tmp_path, gpus, capsys):
    generator, choice = load(policy, world, tmp_path)
    assert generator.arguments == (3, 40 + 64, "ppo.generator")
    assert choice == {"value": "vllm", "reason": "each rank has a GPU with memory for it"}
    printed = "ppo.generator: auto is vllm: each rank has a GPU with memory for it\n"
    assert capsys.readouterr().out == printed
    load(policy, replace(world, rank=1), tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"world": {"deterministic": True}}, "launch.deterministic is true, and vLLM does not"),
        ({"versions": {}}, "rank 0 has no package vllm"),
        ({"find_spec": lambda name: None}, "rank 0 has no package vllm"),
        ({"on_gpu": lambda: False}, "rank 0 has no GPU"),
        ({"refused": "gather_for_generation: found false"}, "gather_for_generation: found false"),
        ({"begun": "transformers"}, "the run began with it"),
    ],
)
def test_transformers_answers_for_a_reason(
    policy, world, tmp_path, gpus, monkeypatch, capsys, change, reason
):
    for name in change.keys() & {"find_spec", "on_gpu"}:
        monkeypatch.setattr(chosen_generator, name, change.pop(name))
    world = replace(world, **change.pop("world", {}))
    generator, choice = load(policy, world, tmp_path, **change)
    assert isinstance(generator, TransformersGenerator)
    assert choice["value"] == "transformers" and choice["reason"].startswith(reason)
    assert capsys.readouterr().out.startswith(f"ppo.generator: auto is transformers: {reason}")


def test_vllm_needs_memory_for_weights_and_pages(policy, world, tmp_path, gpus, monkeypatch):
    """Two layers with 4 heads of 8 numbers, all float32; 1 + 3 pages of 128 tokens for 104."""
    numbers = sum(weight.numel() for weight in load_policy(policy, "fp32").parameters())
    needed = 4 * (numbers + 2 * 2 * 4 * 8 * 128 * 4)
    accelerator = chosen_generator.get_accelerator()
    monkeypatch.setattr(accelerator, "available_memory", lambda: needed + 8)
    assert load(policy, world, tmp_path, later=8)[1]["value"] == "vllm"
    _, choice = load(policy, world, tmp_path, later=9)  # what training allocates at its first step
    assert choice == {
        "value": "transformers",
        "reason": "vLLM needs 0.0 GiB for weights and pages, of which 0.0 are free on rank 0",
    }


def test_a_family_that_vllm_refuses_is_the_reason(policy, world, tmp_path, gpus, monkeypatch):
    def refuse(*_, **__):
        raise ConfigError("ppo.generator: found vllm, expected another. Fix: set it so")

    monkeypatch.setattr(chosen_generator, "VLLMGenerator", refuse)
    generator, choice = load(policy, world, tmp_path)
    assert isinstance(generator, TransformersGenerator)
    assert choice["reason"] == "ppo.generator: found vllm, expected another"


def test_a_run_that_began_with_vllm_goes_on_with_nothing_else(
    policy, world, tmp_path, gpus, monkeypatch
):
    assert load(policy, world, tmp_path, begun="vllm")[1]["value"] == "vllm"
    monkeypatch.setattr(chosen_generator, "on_gpu", lambda: False)
    with pytest.raises(
        StageError,
        match=r"ppo\.generator: found transformers for auto \(rank 0 has no GPU\), expected vllm, "
        r"which has sampled up to step 2\. Fix: resume where vllm can answer, or set ppo\.generator"
        r" to transformers, which begins again",
    ):
        load(policy, world, tmp_path, begun="vllm")


def test_training_works_with_the_choice_and_its_checkpoints_name_it(ppo_inputs, world, tmp_path):
    """On this CPU that is transformers, whose log-probabilities in fp32 need no correction."""
    assert ppo_config().generator == "auto"
    setup = run_ppo(ppo_config(checkpoint_every=1), ppo_inputs, world, tmp_path).setup
    assert setup.config.generator == "transformers" and setup.config.correction is None
    loops = [json.loads(file.read_text()) for file in tmp_path.glob("checkpoints/*/loop.json")]
    assert loops and {loop["generator"] for loop in loops} == {"transformers"}


@pytest.mark.parametrize("gathers", [True, False])
def test_training_works_with_vllm_if_the_ranks_chose_it(
    ppo_inputs, world, tmp_path, gpus, monkeypatch, gathers
):
    class Other(Fast, TransformersGenerator):
        def __init__(self, policy, contract, **_):
            TransformersGenerator.__init__(self, policy, contract)

    monkeypatch.setattr(chosen_generator, "VLLMGenerator", Other)
    given = LaunchedJob.__init__
    monkeypatch.setattr(
        LaunchedJob, "__init__", lambda *own, **more: given(*own, versions={"vllm": "1"}, **more)
    )
    run = run_ppo(ppo_config(gather_for_generation=gathers), ppo_inputs, world, tmp_path)
    if not gathers:  # which vLLM cannot do
        assert run.setup.config.generator == "transformers"
        return
    assert run.setup.config.generator == "vllm" and run.setup.config.correction is not None
    assert all(line["rollout/effective_sample_size"] > 0.99 for line in run.lines)
