"""Generation by the continuous batching of transformers, with keys and values in pages.

The next prompt takes the place of a finished response at once, and the responses to one prompt
share its pages. Generation reads the weights of the model itself, not a copy. Each rollout frees
all its pages. Written for transformers 5.23.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, gcd
from typing import ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import FutureRequestState

from rlhf_pipeline.config.sampling import SamplingConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine
from rlhf_pipeline.distributed.zero import for_generation
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.rl.sampling import sampled
from rlhf_pipeline.rollout.generation import Rollout, Seed, uniform_draws
from rlhf_pipeline.rollout.parity import has_parity
from rlhf_pipeline.runtime import heartbeat

PAGE = 256
"""Tokens of a page; flash attention requires multiples of 256."""


@dataclass(frozen=True)
class PagedGenerator:
    """Samples from a model, or from one in a DeepSpeed engine.

    Raises ConfigError if continuous batching does not compute what the model's family computes.
    """

    policy: PreTrainedModel | DeepSpeedEngine
    """A model without dropout; an engine may be in training mode."""
    contract: TokenContract
    """The tokens of the policy."""

    def __post_init__(self) -> None:
        if not has_parity(self, self.policy, self.contract):
            module = getattr(self.policy, "module", self.policy)
            raise ConfigError(
                "ppo.generator: found paged, expected another generator for the family "
                f"{module.config.model_type}, whose attention continuous batching does not "
                "compute. Fix: set it to transformers"
            )

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[Seed]
    ) -> Rollout:
        """See `Generator.generate`."""
        draws = uniform_draws(seeds, sampling.max_response_tokens)
        groups = requests(prompts)
        rows = {name: row for group in groups for name, row in group.items()}
        sampler = Sampler(
            {name: draws[row].tolist() for name, row in rows.items()},
            sampling.temperature,
            self.contract.vocab_size,
        )
        responses: list[list[int]] = [[] for _ in prompts]
        logprobs = torch.zeros(draws.shape)
        settings = GenerationConfig(
            do_sample=True,
            num_return_sequences=len(groups[0]),
            max_new_tokens=sampling.max_response_tokens,
            eos_token_id=list(self.contract.eos_ids),
            pad_token_id=self.contract.pad_id,
        )
        longest = max(map(len, prompts)) + sampling.max_response_tokens
        with (
            for_generation(self.policy) as model,
            batching(model, settings, longest, sampling.batch_size_per_gpu, sampler) as manager,
        ):
            for group in groups:
                *_, (name, row) = group.items()
                manager.add_request(list(prompts[row]), name)
            for _ in prompts:
                name, tokens, own = answer(manager)
                responses[rows[name]] = tokens
                logprobs[rows[name], : len(own)] = torch.tensor(own)
        sequences = collate(prompts, responses, self.contract.pad_id)
        return Rollout(sequences, logprobs[:, : sequences.response_ids.shape[1]])


def requests(prompts: Sequence[Sequence[int]]) -> list[dict[str, int]]:
    """The rows of each request by the names of its responses; the last name is the request's.

    Every request has equally many responses, and they have equal prompts. So a prompt with more
    rows has several requests.
    """
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        groups[tuple(prompt)].append(row)
    size = gcd(*map(len, groups.values()))
    return [
        {f"{rows[start]}__child#{i}": rows[start + 1 + i] for i in range(size - 1)}
        | {str(rows[start]): rows[start]}
        for rows in groups.values()
        for start in range(0, len(rows), size)
    ]


@contextmanager
def batching(
    model: PreTrainedModel,
    settings: GenerationConfig,
    longest: int,
    rows: int,
    sampler: "Sampler",
) -> Iterator[ContinuousBatchingManager]:
    """Continuous batching inside the block, for `rows` responses of `longest` tokens at a time."""
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")  # it takes flash attention instead if that is installed
    pages = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=rows * ceil(longest / PAGE),
        max_requests_per_batch=rows,
        return_logprobs=True,
    )
    manager = model.init_continuous_batching(settings, pages)
    manager.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([sampler]))
    manager.logit_processor.tensors_required = 1
    try:
        with patch.object(ModelRunner, "_sample", lambda _, *given: sampler.sample(*given)):
            manager.start()
            try:
                yield manager
            finally:
                manager.stop(hard_stop=True)
                manager.destroy()
    finally:
        model.set_attn_implementation(attention)


def answer(manager: ContinuousBatchingManager) -> tuple[str, list[int], list[float]]:
    """Wait for the next finished response: its name, its tokens and their log-probabilities."""
    result = None
    while result is None:
        result = manager.get_result(timeout=1.0)
        fault = manager.background_thread_status.fatal_error
        if result is None and fault is not None:
            raise fault
    if result.error is not None:
        raise RuntimeError(f"continuous batching of transformers failed: {result.error}")
    return result.request_id, result.generated_tokens, result.logprobs


class Sampler(ContinuousBatchingLogitsProcessor):
    """Samples each token by the random number of its response and position.

    Continuous batching knows random numbers per batch only. The numbers travel as the arguments of
    a logits processor, in tensors that CUDA graphs can read again.
    """

    supported_kwargs: ClassVar[dict[str, type]] = {}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, draws: dict[str, list[float]], temperature: float, vocab_size: int) -> None:
        self._draws = draws
        self._temperature = temperature
        self._vocab_size = vocab_size
        self._now = torch.empty(0)

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """The numbers of rows that only fill a CUDA graph."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> Tensor:
        """The numbers of a batch, float32 as int32."""
        heartbeat.tick()
        states = [request.state for request in requests_with_new_token]
        numbers = [
            # Each state counts the tokens up to the one before the new token.
            draws[state.position_offset - (state._true_initial_tokens or len(state.initial_tokens))]
            if (draws := self._draws.get(state.request_id))
            else 0.0  # a request that warms up
            for state in states
        ]
        below_one = 1 - 2**-24  # the nearest float32 number of a draw can be 1
        return torch.tensor(numbers, dtype=torch.float32).clamp(max=below_one).view(torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Keep the numbers for `sample`; the scores stay."""
        self._now = tensor_arg[: len(scores)].view(torch.float32)
        return scores

    def sample(self, scores: Tensor, output_ids: Tensor) -> None:
        """Write tokens and log-probabilities: (2, N) int32 for scores (1, N, V)."""
        tokens, logprobs = sampled(
            scores[0], self._now.double(), self._temperature, self._vocab_size
        )
        output_ids[0, : len(tokens)].copy_(tokens)
        output_ids[1, : len(tokens)].copy_(logprobs.view(torch.int32))
