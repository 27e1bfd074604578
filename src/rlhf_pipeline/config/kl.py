"""The KL penalty of PPO and its limits."""

from collections.abc import Iterator
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from rlhf_pipeline.config.block import Block


class KLConfig(Block):
    """KL constraint to the reference.

    KL is in nats per response: the sum over its tokens, averaged over responses.
    """

    coef: NonNegativeFloat = 0.1
    """Coefficient of the per-token penalty -coef * KL in the reward. With `target`: its initial
    value."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of a token's KL in the penalty (Schulman, "Approximating KL Divergence"): k1, which
    is log pi - log pi_ref, is unbiased; k2 and k3 are never negative. Metrics always use k1."""
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
