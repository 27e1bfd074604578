from typing import Literal

from pydantic import Field, PositiveFloat

from rlhf_pipeline.config.block import Block

Promote = Literal["never", "gate", "always"]


class RegisterConfig(Block):
    """Name of the registered model, and the promotion gate, see `rlhf_pipeline.evaluation.gate`."""

    model: str = Field(default="rlhf-policy", min_length=1, pattern=r"^[^/:']+$")
    """Name of the registered model. The SFT baseline and the candidates (PPO, DPO) are versions of
    this one model, so MLflow can compare them. MLflow allows neither slash nor colon,
    and its filters no apostrophe."""
    promote: Promote = "gate"
    """When the candidate becomes the champion. gate: if it passes every condition below and beats
    the present champion. The conditions are checked and reported in any case."""
    min_win_rate_lower: float = Field(default=0.5, ge=0, lt=1)
    """The lower end of the 95% interval on the paired win rate (equal draws) against SFT, and on
    the one against the champion, must be above this value. 0.5 requires a policy that is better
    beyond chance; a mean above 0.5 is not enough."""
    min_gain: float = Field(default=0.1, ge=0)
    """Least gain over SFT with equal draws: lower end of the 95% interval, in units of the scores'
    spread. Many wins by a hair's breadth do not count."""
    require_independent_judge: bool = False
    """Whether the judge that decides must be one that training has not optimized."""
    max_kl: float = Field(default=10.0, gt=0)
    """Largest KL from SFT, nats per response. Far from SFT the reward model's score still rises
    while the true quality falls: the policy exploits the reward model."""
    max_length_ratio: float = Field(default=3.0, ge=1)
    """Answers may be this many times longer or shorter than SFT's, on average."""
    max_eos_drop: float = Field(default=0.1, ge=0, le=1)
    """Largest allowed fall of the share of answers that end by themselves."""
    max_repetition_rise: float = Field(default=0.1, ge=0, le=1)
    """Largest allowed rise of the share of word triples that repeat within an answer."""
    max_phrase_rise: float = Field(default=0.3, ge=0, le=1)
    """Largest allowed rise of the share of answers with a common four-word phrase, as a fraction of
    (1 - SFT's share). 1 switches the check off."""
    max_task_drop: float = Field(default=0.05, ge=0, le=1)
    """Largest allowed fall of the share of right documents of a task (`evaluate.tasks`)."""
    min_score_spread: PositiveFloat = 0.1
    """Least standard deviation of the candidate's scores, relative to that of SFT's scores."""
