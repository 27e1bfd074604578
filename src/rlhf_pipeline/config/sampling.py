from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from rlhf_pipeline.config.block import Block


class SamplingConfig(Block):
    """How responses are sampled.

    Top-k and top-p are not offered: log-probabilities must belong to the sampled distribution.
    """

    temperature: PositiveFloat = 1.0
    """Softmax temperature in sampling and in every log-probability."""
    max_response_tokens: PositiveInt = 64
    """Maximum length of a response; longer ones are cut."""
    batch_size_per_gpu: PositiveInt = 64
    """Prompts answered at once on each rank; limits the memory of the key-value cache."""


class EvaluationSamplingConfig(SamplingConfig):
    """How responses are sampled to compare policies."""

    temperature: NonNegativeFloat = 1.0
    """Softmax temperature in sampling and in every log-probability. 0: greedy, always the most
    likely token; log-probabilities are then those at temperature 1."""
