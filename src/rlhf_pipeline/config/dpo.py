"""Direct preference optimization: the policy from the comparisons, without a reward model and without sampling."""

from __future__ import annotations

from typing import Self

from pydantic import Field, PositiveFloat, model_validator

from rlhf_pipeline.config.training import FrozenModelConfig, SupervisedConfig


class DPOConfig(SupervisedConfig):
    """Direct preference optimization (Rafailov et al. 2023) on the reward model's comparisons. Best = lowest held-out loss."""

    beta: PositiveFloat = 0.1
    """Strength of the leash to the reference, as PPO's KL coefficient: the smaller, the further the policy moves for the
    same preferences."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of the preferences that are taken to be wrong (conservative DPO, Mitchell 2023). 0: all are trusted."""

    reference: FrozenModelConfig = FrozenModelConfig()
    """The frozen SFT model that the policy starts from and is leashed to. With LoRA (without `train_rest`) it is the policy
    itself, its adapters off."""

    @model_validator(mode="after")
    def _reference(self) -> Self:
        self.reference.require_effect("reference", self)
        self.reference.require_offload_possible("reference", self)
        return self
