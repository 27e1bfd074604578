"""Whole pipelines whose answers vLLM samples, in training and in evaluation: `make vllm`."""

import json
from importlib.util import find_spec

import pytest
from conftest import Project

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cold,  # vLLM looks at every module, and those of a web server resist
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm: make vllm"),
]
HEADS = (  # of 32 numbers, the smallest on a CPU
    "base_model.architecture.hidden_size=64,base_model.architecture.num_attention_heads=2,"
    "base_model.architecture.num_key_value_heads=2"
)


@pytest.mark.parametrize(
    ("pipeline", "stage", "sizes"),
    [
        ("full", "ppo", ""),
        (
            "grpo", "grpo",
            "grpo.steps=3,grpo.rollout_batch_size=16,grpo.minibatch_size=16,grpo.evaluations=1,"
            "grpo.responses_per_prompt=4,grpo.sampling.max_response_tokens=16",
        ),
    ],
    ids=["full", "grpo"],
)  # fmt: skip
def test_a_pipeline_samples_by_vllm(tmp_path, pipeline, stage, sizes):
    """The answers of each step come from its weights; otherwise, their log-probabilities part."""
    own = Project(tmp_path)
    generators = f"{stage}.generator=vllm,evaluate.generator=vllm"
    params = ",".join(filter(None, [HEADS, generators, sizes]))
    output = own.kedro(f"--pipeline={pipeline}", params=params)
    assert f"{stage}: finished" in output
    (recipe,) = own.recipes(stage)
    lines = [json.loads(line) for line in (recipe / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["metrics"]["rollout/logprob_gap"] for line in lines]
    assert len(gaps) > 1 and max(gaps) < 1e-4
    evaluation = own.newest(f"08_reporting/{'' if stage == 'ppo' else 'grpo_'}evaluation")
    assert '"generator": "vllm"' in (evaluation / "manifest.json").read_text()
