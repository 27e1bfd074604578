from collections.abc import Iterator

from pydantic import Field, PositiveFloat

from rlhf_pipeline.config.training import (
    FrozenModel,
    FrozenModelConfig,
    StageModel,
    SupervisedConfig,
    TrainedModel,
)


class DPOConfig(SupervisedConfig):
    """Direct preference optimization (Rafailov et al. 2023) on the reward model's comparisons.

    The best model has the lowest held-out loss.
    """

    beta: PositiveFloat = 0.1
    """Strength of the KL constraint to the reference. A smaller value lets the policy move further
    for the same preferences."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of wrong preferences (conservative DPO, Mitchell 2023). 0: all are trusted."""
    reference: FrozenModelConfig = FrozenModelConfig()
    """The frozen SFT model that the KL constraint refers to. With LoRA (without `train_rest`), the
    reference is the policy with its adapters disabled."""

    def models(self) -> list[StageModel]:
        policy = TrainedModel("dpo", self)
        if self.is_own_reference:
            return [policy]
        return [policy, FrozenModel("dpo.reference", self.reference.beside(self.deepspeed))]

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        yield from self.reference.faults_as_reference(self)
