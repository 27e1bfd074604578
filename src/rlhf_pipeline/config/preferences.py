"""DPO and KTO: a policy learns from preferences beside its frozen start."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from rlhf_pipeline.config.doors import DPO_LOSS, OF_REFERENCE, parameters
from rlhf_pipeline.config.training import (
    FrozenModel,
    FrozenModelConfig,
    StageModel,
    SupervisedConfig,
    TrainedModel,
)


class ReferencedConfig(SupervisedConfig):
    """Fields common to DPO and KTO: a policy that trains beside its frozen start."""

    stage: ClassVar[str]

    beta: PositiveFloat = 0.1
    """Strength of the KL constraint to the reference; a smaller one allows the policy more."""
    reference: FrozenModelConfig = FrozenModelConfig()
    """The frozen SFT model that the KL constraint refers to. With LoRA (without `train_rest`), the
    policy with its adapters disabled takes its place."""

    @property
    def has_reference(self) -> bool:
        """Whether a reference scores the answers, too."""
        return True

    @property
    def loads_reference(self) -> bool:
        """Whether the reference is a model of its own."""
        return self.has_reference and not self.is_own_reference

    def models(self) -> list[StageModel]:
        """The policy, and its reference if that is a model of its own."""
        policy, frozen = TrainedModel(self.stage, self), self.reference.beside(self.deepspeed)
        reference = FrozenModel(f"{self.stage}.reference", frozen)
        return [policy, reference] if self.loads_reference else [policy]

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        yield from self.reference.faults_as_reference(self)


class DPOConfig(ReferencedConfig):
    """Direct preference optimization (Rafailov et al. 2023) on the reward model's comparisons."""

    stage = "dpo"

    loss: Annotated[str, DPO_LOSS] = "sigmoid"
    """Loss of a comparison: sigmoid, that of the paper; ipo, hinge, robust, sigmoid_norm, simpo
    (without a reference); or a function of yours. docs/dpo.md compares them."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of wrong preferences: conservative DPO (Mitchell 2023), or loss robust."""
    target_margin: NonNegativeFloat = 1.0
    """Loss simpo: the margin by which the chosen answer should win (1.0 in Meng et al. 2024)."""
    sft_coef: NonNegativeFloat = 0.0
    """Weight of the mean negative log-likelihood of a chosen answer's tokens (Pang et al. 2024)."""

    @property
    def has_reference(self) -> bool:
        return not self.asked.isdisjoint(OF_REFERENCE.split())

    @property
    def asked(self) -> set[str]:
        """What the loss reads by its source, or all that there is if the source does not tell."""
        return parameters(DPO_LOSS.place(self.loss)) or {*DPO_LOSS.arguments.split()}

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        unused = {"label_smoothing", "target_margin"} - self.asked
        unused |= set() if self.has_reference else {"reference", "fixed_reference"}
        unused &= type(self).model_fields.keys()
        for name in sorted(unused):
            default, value = type(self).model_fields[name].default, getattr(self, name)
            if value != default:
                found, expected = ("a block", "none") if name == "reference" else (value, default)
                yield (
                    f"{name}: found {found} with loss {self.loss}, expected {expected}: it has no "
                    "effect. Fix: leave it out, or choose another loss"
                )


class KTOConfig(ReferencedConfig):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024) on good and bad answers."""

    stage = "kto"

    kl: Literal["mismatched", "none"] = "mismatched"
    """The log ratio from which an answer is a gain. mismatched: the mean of prompts with answers to
    others, at least 0, for which each step has a further pass of both models; none: 0, without it
    (APO-zero without pairs, D'Oosterlinck et al. 2024)."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of good answers; in all they should weigh as much as bad ones, or a little more."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of bad answers."""

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if self.batch_size == 1 and self.kl != "none":
            expected = "at least 2: the KL of a step needs answers to other prompts"
            yield self._fault("batch_size", expected, "raise it")
