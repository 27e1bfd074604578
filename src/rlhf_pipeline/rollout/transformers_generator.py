"""Generation with transformers, from one uniform random number per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from rlhf_pipeline.config.sampling import SamplingConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.zero import for_generation, is_sharded
from rlhf_pipeline.models.sequences import collate, pad
from rlhf_pipeline.rollout.generation import Rollout, Seed, uniform_draws
from rlhf_pipeline.runtime import heartbeat


@dataclass(frozen=True)
class TransformersGenerator:
    """Samples from a Hugging Face model, or from one in a DeepSpeed engine."""

    policy: PreTrainedModel | DeepSpeedEngine
    """A model without dropout; an engine may be in training mode."""
    contract: TokenContract
    """The tokens of the policy."""
    gather: bool = True
    """Whether to gather the weights of an engine at ZeRO stage 3 once for each call. This needs
    memory for the whole model; False gathers each layer at each token."""

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[Seed]
    ) -> Rollout:
        """See `Generator.generate`."""
        draws = uniform_draws(seeds, sampling.max_response_tokens)
        responses: list[list[int]] = [[] for _ in prompts]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        with for_generation(self.policy, gather=self.gather) as model:
            for index in lengths.argsort(stable=True).split(sampling.batch_size_per_gpu):
                batch = [prompts[i] for i in index]
                sampled = self._sample(model, batch, draws[index], sampling)
                for i, response in zip(index.tolist(), sampled, strict=True):
                    responses[i] = response
        return Rollout(collate(prompts, responses, self.contract.pad_id))

    def _sample(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        draws: Tensor,
        sampling: SamplingConfig,
    ) -> list[list[int]]:
        """Responses to one micro batch of prompts."""
        contract = self.contract
        ids, mask, draws = (
            tensor.to(self.policy.device, non_blocking=True)
            for tensor in (*pad(prompts, contract.pad_id, left=True), draws)
        )
        sampler = InverseCDFSampler(draws, ids.shape[1], sampling.temperature, contract.vocab_size)
        output = model.generate(
            input_ids=ids,
            attention_mask=mask.long(),
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_response_tokens,
                do_sample=False,  # the sampler leaves a single token to choose
                eos_token_id=contract.eos_token_id,
                pad_token_id=contract.pad_id,
            ),
            logits_processor=LogitsProcessorList([sampler]),
            # ZeRO-3 needs every rank in every forward pass, so all ranks wait for the slowest.
            synced_gpus=is_sharded(model) and not self.gather,
        )
        return [_until_eos(row, contract.eos_ids) for row in output[:, ids.shape[1] :].tolist()]


@dataclass(frozen=True)
class InverseCDFSampler(LogitsProcessor):
    """Samples from softmax(logits / temperature) by inverting its CDF at given uniform numbers.

    The sampled token is the only one with a finite logit. Padded vocabulary rows have probability
    0.
    """

    draws: Tensor
    """(B, R) uniform numbers in [0, 1)."""
    prompt_width: int
    """Columns of the prompts."""
    temperature: float
    vocab_size: int
    """Tokens of the vocabulary, without padded rows."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits (B, V) with one finite entry in each row."""
        heartbeat.tick()
        draws = self.draws[:, input_ids.shape[1] - self.prompt_width].unsqueeze(1)
        cdf = (scores[:, : self.vocab_size].double() / self.temperature).softmax(-1).cumsum(-1)
        tokens = torch.searchsorted(cdf, draws * cdf[:, -1:], right=True)
        # For logits that are not finite, the search ends behind the last token. The
        # log-probabilities of the response show the fault later. A check of each token here would
        # make the device wait.
        tokens = tokens.clamp(max=self.vocab_size - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)


def _until_eos(row: list[int], eos_ids: Sequence[int]) -> list[int]:
    """The response up to and including its first EOS; all of it if there is none."""
    end = next((count for count, token in enumerate(row, 1) if token in eos_ids), len(row))
    return row[:end]
