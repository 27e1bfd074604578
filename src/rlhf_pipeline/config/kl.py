from collections.abc import Iterator
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from rlhf_pipeline.config.block import Block


class KLConfig(Block):
    """KL constraint to the reference.

    KL is in nats per response: the sum over its tokens, averaged over responses.
    """

    coef: NonNegativeFloat = 0.1
    """Coefficient of the KL penalty per token. With `target`: its initial value."""
    place: Literal["reward", "loss"] = "reward"
    """Where the penalty acts. reward: each token's reward contains -coef * k1, so that a token also
    answers for the KL of later tokens. loss: the policy's loss contains coef * k2, and advantages
    see no KL. Each place has the one estimator with the gradient of the KL there (Tang and Munos
    2025): k2 and k3 hardly restrain the policy as a reward, nor do k1 and k3 as a loss."""
    target: PositiveFloat | None = None
    """KL that an adaptive coefficient maintains (Ziegler et al. 2019). None: fixed coefficient."""
    horizon: PositiveInt = 1000
    """Responses over which the adaptive coefficient changes by a factor of at most 1.22 (e^0.2)."""
    maximum: PositiveFloat | None = None
    """KL limit: above it, training stops early and exports the best model within the limit. At a
    large KL, the reward model's score rises while true quality falls (Gao et al. 2022). None: no
    limit."""
    explosion: PositiveFloat | None = 100.0
    """KL above which training has diverged: the stage fails and exports nothing. Must exceed
    `maximum`. Useful policies stay below some tens of nats; very long responses with a small `coef`
    may need more. None: no limit."""
    stop_update: PositiveFloat | None = None
    """Skip the remaining epochs of a step once the mean KL per token from the sampling policy to
    the trained one (`policy/approx_kl`) exceeds this over an epoch. Learning-rate schedules advance
    as if no epoch was skipped. None: no limit."""

    def _faults(self) -> Iterator[str]:
        if (
            self.explosion is not None
            and self.maximum is not None
            and self.explosion <= self.maximum
        ):
            yield (
                f"explosion: found {self.explosion:g}, expected more than maximum {self.maximum:g}"
                ". Fix: raise it, or set it to null for no limit"
            )
