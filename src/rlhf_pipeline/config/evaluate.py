"""The comparison of a candidate policy, PPO or DPO, with the SFT baseline."""

from __future__ import annotations

from pydantic import PositiveInt

from rlhf_pipeline.config.block import Block, operational
from rlhf_pipeline.config.ppo import SamplingConfig
from rlhf_pipeline.config.training import Precision


class EvaluateConfig(Block):
    """Both policies answer the same held-out prompts by the same decoding, with the same random draws."""

    prompts: PositiveInt = 512
    """Held-out prompts, at most. The half width of the win rate's interval falls as one over its root: 512 give 0.04."""

    micro_batch_size_per_gpu: PositiveInt = 64
    """Responses scored in one forward pass on one rank."""

    sampling: SamplingConfig = SamplingConfig()
    """The decoding of both policies."""

    precision: Precision = "fp32"
    """Precision of all three models."""

    samples: PositiveInt = 20
    """Pairs of answers printed in the report."""


class CandidateConfig(Block):
    """The policy that is compared with the SFT baseline. The pipeline sets this block, not the user."""

    name: str
    """Name of the stage that trained it: "ppo" or "dpo"."""

    caveats: dict[str, str] = operational({})
    """What to bear in mind about its win rate, by judge."""
