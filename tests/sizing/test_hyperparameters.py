"""Hyper-parameters: the published values, by model, size and method."""

import pytest

from rlhf_pipeline.sizing.models import MODELS
from rlhf_pipeline.sizing.presets import SOURCES, hyperparameters

RATES = ["sft", "reward_model", "ppo.actor", "ppo.critic", "dpo"]


def rates(model, method):
    values = hyperparameters(model, method)
    return [values[f"{name}.optimizer.learning_rate"].value for name in RATES]


@pytest.mark.parametrize(
    ("model", "method", "expected"),
    [
        # InstructGPT's rates for 1.3B and 6B, and for 175B; PPO as in Huang et al. up to 7B.
        ("opt-1.3b", "full", [9.65e-6, 9e-6, 3e-6, 3e-6, 5e-7]),
        ("opt-13b", "full", [9.65e-6, 9e-6, 1e-6, 1e-6, 5e-7]),
        ("opt-66b", "full", [5.03e-6, 9e-6, 1e-6, 1e-6, 5e-7]),
        ("bloom", "full", [5.03e-6, 9e-6, 1e-6, 1e-6, 5e-7]),
        ("llama-2-7b", "full", [2e-5, 1e-5, 3e-6, 3e-6, 5e-7]),
        ("llama-2-70b", "full", [2e-5, 5e-6, 1e-6, 1e-6, 5e-7]),
        ("llama-3-8b", "full", [5e-6, 3e-6, 3e-6, 3e-6, 5e-7]),
        ("llama-3-70b", "full", [2e-6, 3e-6, 1e-6, 1e-6, 5e-7]),
        ("mistral-7b", "full", [2e-5, 9e-6, 3e-6, 3e-6, 5e-7]),
        ("qwen3-8b", "full", [7e-6, 9e-6, 3e-6, 3e-6, 5e-7]),
        # Adapters: SFT as in QLoRA, with half the rate above 13B; else ten times the rate.
        ("llama-3-8b", "lora", [2e-4, 3e-5, 3e-5, 3e-5, 5e-6]),
        ("llama-2-13b", "qlora", [2e-4, 1e-4, 1e-5, 1e-5, 5e-6]),
        ("llama-2-70b", "qlora", [1e-4, 5e-5, 1e-5, 1e-5, 5e-6]),
    ],
)
def test_learning_rates(model, method, expected):
    assert rates(model, method) == expected


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("model", MODELS)
def test_every_value_names_a_publication(model, method):
    for name, (_, source) in hyperparameters(model, method).items():
        assert any(known in source for known in SOURCES), name


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # Steps, responses of a step and of an update, passes, KL coefficient, temperature.
        ("llama-2-7b", (1953, 512, 512, 4, 0.05, 0.7)),  # Huang et al.
        ("llama-2-13b", (400, 512, 64, 1, 0.01, None)),  # Llama 2
        ("llama-2-70b", (400, 512, 64, 1, 0.005, None)),
    ],
)
def test_ppo_follows_one_publication_as_a_whole(model, expected):
    values = hyperparameters(model, "full")
    names = (
        "steps", "rollout_batch_size", "minibatch_size", "ppo_epochs", "kl.coef",
        "sampling.temperature",
    )  # fmt: skip
    found = [values.get(f"ppo.{name}") for name in names]
    assert tuple(value and value.value for value in found) == expected
    sources = {v.source for n, v in values.items() if n.startswith("ppo.") and "tokens" not in n}
    paper = "Huang 2024" if model == "llama-2-7b" else "Llama 2"
    assert all(source.endswith(paper) for source in sources)


def test_dpo_follows_one_publication_as_a_whole():
    names = ("dpo.beta", "dpo.epochs", "dpo.batch_size", "dpo.optimizer.learning_rate")
    plain = hyperparameters("llama-3-70b", "full")
    assert [plain[name].value for name in names] == [0.1, 1, 64, 5e-7]  # Rafailov et al.
    zephyr = hyperparameters("mistral-7b", "full")
    assert [zephyr[name].value for name in names] == [0.01, 1, 128, 5e-7]


def test_weight_decay_is_for_whole_weights():
    decay = "sft.optimizer.weight_decay"
    assert hyperparameters("llama-2-7b", "full")[decay] == (0.1, "Llama 2")
    assert hyperparameters("llama-2-7b", "lora")[decay] == (0.0, "Dettmers 2023")
