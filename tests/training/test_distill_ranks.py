"""Distillation on two ranks, whole and sharded; the ranks of the lab have it with one launch."""

from functools import cache

import pytest
from tiny_jobs import logged, trained

from rlhf_pipeline.config.policies import DistillConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training import ppo
from rlhf_pipeline.training.ppo_setup import set_up

CASES = {
    "whole": (0, 0, "fp32", None),
    "sharded": (3, 3, "fp32", None),
    "likeliest": (2, 3, "fp32", 20),
    "bf16": (3, 3, "bf16", None),
}
SHORT = ("whole", "sharded")


def distilled(inputs, world, folder, student, teacher, precision, top_k):
    """The metrics of each step."""
    config = DistillConfig.model_validate(
        {
            "teacher": str(inputs["teacher"]), "beta": 0.5, "top_k": top_k, "steps": 3,
            "rollout_batch_size": 8, "minibatch_size": 4, "micro_batch_tokens": 40,
            "given_batch_size": 2, "evaluations": 1, "sampling": {"max_response_tokens": 6},
            "actor": trained(student, precision),
            "reference": {"deepspeed": {"zero_stage": teacher}},
        }
    )  # fmt: skip
    names = ("prompts", "sft_model", "demonstrations", "teacher")
    own = {name: inputs[name] for name in names}
    job = LaunchedJob("distill", "f", 1, {}, own, {}, folder, 60.0)
    ppo.train(set_up(job, config, TokenContract.read(inputs["sft_model"]), world))
    return logged(folder)


def case(lab, *settings):
    inputs = {**lab.inputs, "teacher": lab.models["llama"]}
    return distilled(inputs, lab.world, lab.folder, *settings)


@pytest.fixture(scope="module")
def alone(program_inputs, make_model, world, tmp_path_factory):
    """The metrics of one whole rank, by the number of tokens that are apart."""
    inputs = {**program_inputs, "teacher": make_model("llama", seed=3)}

    @cache
    def run(top_k):
        folder = tmp_path_factory.mktemp("alone")
        return distilled(inputs, world, folder, 0, 0, "fp32", top_k)

    return run


@pytest.mark.parametrize(
    "name",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in CASES],
)
def test_ranks_and_shards_change_nothing(cells, alone, name):
    _, _, precision, top_k = CASES[name]
    metrics = ("objective/kl", "policy/loss", "given/loss", "policy/entropy")
    tolerance = 1e-4
    if precision == "bf16":  # rounding makes it sample other answers
        metrics, tolerance = ("given/loss",), 0.02
    for found, expected in zip(cells[name], alone(top_k), strict=True):
        for metric in metrics:
            assert found[metric] == pytest.approx(expected[metric], rel=tolerance), metric
