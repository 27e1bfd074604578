"""The hyper-parameters of a model and a method, from the published recipes in recipes.yml."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from rlhf_pipeline.sizing.models import find_model

Method = Literal["full", "lora", "qlora"]
RECIPES = yaml.safe_load(Path(__file__).with_name("recipes.yml").read_text(encoding="utf-8"))
SOURCES: Mapping[str, str] = RECIPES["sources"]
"""The publications."""
ADAPTERS: Mapping[str, tuple[dict[str, Any], str]] = RECIPES["adapters"]
"""The block `lora` of each method, and its source."""
LORA_FACTOR = 10
"""Learning rate of adapters, relative to that of whole models."""
RATE, DECAY = "optimizer.learning_rate", "optimizer.weight_decay"


class Value(NamedTuple):
    """A value of a parameter, and its source."""

    value: Any
    source: str


def hyperparameters(model: str, method: Method) -> dict[str, Value]:
    """Values by dotted name: data, and the recipe of each stage.

    Raises ConfigError if the model is unknown.
    """
    size = find_model(model).shape.parameters
    family = next(name for name in RECIPES["families"] if model.startswith(name))
    published = RECIPES["common"] | RECIPES["families"][family]
    published |= RECIPES["ppo_above_8b" if size > 8.5e9 else "ppo"]
    published |= RECIPES["above_30b"] if size > 29e9 else {}
    published |= RECIPES["above_60b"].get(family, {}) if size > 60e9 else {}
    values = {name: Value(*each) for name, each in published.items()}
    if method == "full":
        return values
    for name, (value, source) in values.items():
        if name.endswith(RATE):
            raised = float(f"{LORA_FACTOR * value:.6g}")
            values[name] = Value(raised, f"{LORA_FACTOR} x {source}: Biderman 2024")
    values[f"sft.{RATE}"] = Value(1e-4 if size > 15e9 else 2e-4, "Dettmers 2023")
    values[f"sft.{DECAY}"] = Value(0.0, "Dettmers 2023")
    return values
