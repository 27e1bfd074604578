"""A generator of random tokens: PPO spends no time on sampling, so a run times the update alone.

    PYTHONPATH=benchmarks kedro run --env=tiny --pipeline=full \
        --params=ppo.generator=random_generator:RandomGenerator,ppo.maximum_logprob_gap=null

and the difference to the same run with `ppo.generator: transformers` is the time of sampling, see
`time/generation_s` and `time/step_s` in metrics.jsonl. All responses have `max_response_tokens`
tokens and no EOS, which is the most that an update can get. The policy learns nothing from them.
"""

from collections.abc import Sequence

import torch

from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.generation.generator import Seed, uniform_draws
from rlhf_pipeline.generation.records import Rollout
from rlhf_pipeline.models.sequences import collate


class RandomGenerator:
    """Draws each token from the whole vocabulary; asks no model."""

    def __init__(self, contract: TokenContract) -> None:
        self.contract = contract

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        seeds: Sequence[Seed],
        prompt_numbers: Sequence[int] | None = None,
    ) -> Rollout:
        """Responses to the prompts, with the log-probabilities of uniform draws."""
        special = {self.contract.pad_id, *self.contract.eos_ids}
        tokens = torch.tensor([i for i in range(self.contract.vocab_size) if i not in special])
        draws = uniform_draws(seeds, sampling.max_response_tokens)
        ids = tokens[(draws * len(tokens)).long()]
        sequences = collate(
            prompts, ids.tolist(), self.contract.pad_id, prompt_numbers=prompt_numbers
        )
        logprobs = torch.full(ids.shape, 1 / len(tokens)).log()
        return Rollout(sequences, logprobs)
