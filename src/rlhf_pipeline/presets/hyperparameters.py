"""Published recipes by model and method. Each value has the name of its source.

PPO and DPO follow one publication each as a whole: a learning rate means little without the number
of updates, their batch and the strength of the KL penalty that it was published with.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from rlhf_pipeline.sizing.models import find_model

Method = Literal["full", "lora", "qlora"]

INSTRUCTGPT = "InstructGPT"
DEEPSPEED_CHAT = "DeepSpeed-Chat"
LLAMA_2 = "Llama 2"
TULU_3 = "Tulu 3"
ZEPHYR = "Zephyr"
QWEN = "Qwen2.5"
HUANG = "Huang 2024"
RAFAILOV = "Rafailov 2023"
QLORA = "Dettmers 2023"
BIDERMAN = "Biderman 2024"
SOURCES: Mapping[str, str] = {
    INSTRUCTGPT: "Ouyang et al. 2022, arXiv 2203.02155, appendix C",
    DEEPSPEED_CHAT: "its training scripts for OPT (DeepSpeedExamples)",
    LLAMA_2: "Touvron et al. 2023, arXiv 2307.09288, section 3",
    TULU_3: "Lambert et al. 2024, arXiv 2411.15124, and the commands in open-instruct",
    ZEPHYR: "Tunstall et al. 2023, arXiv 2310.16944, and alignment-handbook, zephyr-7b-beta",
    QWEN: "Qwen2.5 Technical Report 2024, arXiv 2412.15115, section 4",
    HUANG: "Huang et al. 2024, arXiv 2403.17031, for 1B to 6.9B",
    RAFAILOV: "Rafailov et al. 2023, arXiv 2305.18290, and its code",
    QLORA: "Dettmers et al. 2023, arXiv 2305.14314, and its README",
    BIDERMAN: "Biderman et al. 2024, arXiv 2405.09673, section 5",
}
"""The publications."""


class Value(NamedTuple):
    """A value of a parameter, and its source."""

    value: Any
    source: str


RATE, DECAY = "optimizer.learning_rate", "optimizer.weight_decay"
EPS, SCHEDULE = "optimizer.eps", "optimizer.schedule"

COMMON = {
    "split.sources": Value([{"name": "Dahoas/rm-static"}], DEEPSPEED_CHAT),
    "split.weights": Value([2, 4, 4], DEEPSPEED_CHAT),
    "split.max_prompt_tokens": Value(256, DEEPSPEED_CHAT),
    "split.max_response_tokens": Value(256, DEEPSPEED_CHAT),
    "sft.epochs": Value(2, LLAMA_2),
    "sft.batch_size": Value(64, LLAMA_2),
    f"sft.{RATE}": Value(2e-5, LLAMA_2),
    f"sft.{DECAY}": Value(0.1, LLAMA_2),
    "reward_model.epochs": Value(1, INSTRUCTGPT),
    "reward_model.batch_size": Value(64, INSTRUCTGPT),
    f"reward_model.{RATE}": Value(9e-6, INSTRUCTGPT),
    "ppo.sampling.max_response_tokens": Value(256, DEEPSPEED_CHAT),
    "dpo.beta": Value(0.1, RAFAILOV),
    "dpo.epochs": Value(1, RAFAILOV),
    "dpo.batch_size": Value(64, RAFAILOV),
    f"dpo.{RATE}": Value(5e-7, RAFAILOV),
    "evaluate.sampling.max_response_tokens": Value(256, DEEPSPEED_CHAT),
}
"""For every model, unless a table below has another value. The order is that of the files."""

_INSTRUCTGPT = {
    "sft.epochs": Value(2, DEEPSPEED_CHAT),
    "sft.batch_size": Value(32, INSTRUCTGPT),
    f"sft.{RATE}": Value(9.65e-6, f"rate only: {INSTRUCTGPT} has 16 epochs"),
    f"sft.{DECAY}": Value(0.0, DEEPSPEED_CHAT),
}
_QWEN = {
    "sft.epochs": Value(2, QWEN),
    "sft.batch_size": Value(64, f"not in the report of {QWEN}; {LLAMA_2}"),
    f"sft.{RATE}": Value(7e-6, QWEN),
    f"sft.{DECAY}": Value(0.1, QWEN),
}
BY_FAMILY = {
    "opt": _INSTRUCTGPT,
    "bloom": _INSTRUCTGPT,
    "llama-2": {
        "reward_model.batch_size": Value(512, LLAMA_2),
        f"reward_model.{RATE}": Value(1e-5, LLAMA_2),
    },
    "llama-3": {
        "sft.epochs": Value(2, TULU_3),
        "sft.batch_size": Value(128, TULU_3),
        f"sft.{RATE}": Value(5e-6, TULU_3),
        f"sft.{DECAY}": Value(0.0, TULU_3),
        "reward_model.batch_size": Value(256, TULU_3),
        f"reward_model.{RATE}": Value(3e-6, TULU_3),
    },
    "mistral": {
        "sft.epochs": Value(1, ZEPHYR),
        "sft.batch_size": Value(128, ZEPHYR),
        f"sft.{RATE}": Value(2e-5, ZEPHYR),
        f"sft.{DECAY}": Value(0.0, ZEPHYR),
        "dpo.beta": Value(0.01, ZEPHYR),
        "dpo.batch_size": Value(128, ZEPHYR),
        f"dpo.{RATE}": Value(5e-7, ZEPHYR),
    },
    "qwen2.5": _QWEN,
    "qwen3": _QWEN,
}
"""For the models whose names begin so."""

PPO_UP_TO_8B = {
    "ppo.steps": Value(1953, f"1,000,000 responses: {HUANG}"),
    "ppo.rollout_batch_size": Value(512, HUANG),
    "ppo.minibatch_size": Value(512, HUANG),
    "ppo.ppo_epochs": Value(4, HUANG),
    "ppo.whiten_rewards": Value(True, HUANG),
    "ppo.kl.coef": Value(0.05, HUANG),
    "ppo.sampling.temperature": Value(0.7, HUANG),
    f"ppo.actor.{RATE}": Value(3e-6, HUANG),
    f"ppo.actor.{EPS}": Value(1e-5, HUANG),
    f"ppo.critic.{RATE}": Value(3e-6, HUANG),
    f"ppo.critic.{EPS}": Value(1e-5, HUANG),
    "evaluate.sampling.temperature": Value(0.7, f"as in PPO: {HUANG}"),
}
PPO_ABOVE = {
    "ppo.steps": Value(400, LLAMA_2),
    "ppo.rollout_batch_size": Value(512, LLAMA_2),
    "ppo.minibatch_size": Value(64, LLAMA_2),
    "ppo.ppo_epochs": Value(1, LLAMA_2),
    "ppo.kl.coef": Value(0.01, LLAMA_2),
} | {
    f"ppo.{model}.{name}": Value(value, LLAMA_2)
    for model in ("actor", "critic")
    for name, value in ((RATE, 1e-6), (SCHEDULE, "constant"), (DECAY, 0.1), (EPS, 1e-5))
}
ABOVE_30B = {"ppo.kl.coef": Value(0.005, LLAMA_2)}
ABOVE_60B = {
    "opt": {
        f"sft.{RATE}": Value(5.03e-6, f"rate only: {INSTRUCTGPT} has 16 epochs"),
        "sft.batch_size": Value(8, INSTRUCTGPT),
    },
    "llama-2": {f"reward_model.{RATE}": Value(5e-6, LLAMA_2)},
    "llama-3": {f"sft.{RATE}": Value(2e-6, TULU_3)},
}
ABOVE_60B["bloom"] = ABOVE_60B["opt"]
"""For the largest models of a family."""

ADAPTERS: Mapping[str, tuple[dict[str, Any], str]] = {
    "lora": ({"rank": 16, "alpha": 32}, BIDERMAN),
    "qlora": ({"rank": 64, "alpha": 16, "quantize": "nf4"}, QLORA),
}
"""The block `lora` of each method, and its source."""
LORA_FACTOR = 10
"""Learning rate of adapters, relative to that of whole models."""


def hyperparameters(model: str, method: Method) -> dict[str, Value]:
    """Values by dotted name: data, and the recipe of each stage.

    Raises ConfigError if the model is unknown.
    """
    size = find_model(model).shape.parameters
    family = next(name for name in BY_FAMILY if model.startswith(name))
    values = COMMON | BY_FAMILY[family] | (PPO_ABOVE if size > 8.5e9 else PPO_UP_TO_8B)
    values |= ABOVE_30B if size > 29e9 else {}
    values |= ABOVE_60B.get(family, {}) if size > 60e9 else {}
    if method == "full":
        return values
    for name, (value, source) in values.items():
        if name.endswith(RATE):
            raised = float(f"{LORA_FACTOR * value:.6g}")
            values[name] = Value(raised, f"{LORA_FACTOR} x {source}: {BIDERMAN}")
    values[f"sft.{RATE}"] = Value(1e-4 if size > 15e9 else 2e-4, QLORA)
    values[f"sft.{DECAY}"] = Value(0.0, QLORA)
    return values
