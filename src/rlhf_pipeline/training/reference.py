"""The frozen start of a policy in training, which DPO and KTO compare it with."""

from functools import partial

import torch
from torch import Tensor, nn

from rlhf_pipeline.config.preferences import ReferencedConfig
from rlhf_pipeline.config.training import FrozenModel
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.engine import frozen_model
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.forward import response_logprobs
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.models.lora import WithoutAdapters
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.rl.masking import masked_row_sums
from rlhf_pipeline.runtime.job import LaunchedJob


def load_reference(job: LaunchedJob, config: ReferencedConfig, world: World) -> nn.Module | None:
    """The SFT model, frozen; None if the stage has no such model of its own."""
    load = partial(load_policy, job.inputs["sft_model"], trust_remote_code=job.trust_remote_code)
    frozen = [model.config for model in config.models() if isinstance(model, FrozenModel)]
    return frozen_model(load, frozen[0], world) if frozen else None


def answer_logprobs(policy: nn.Module, answers: Sequences, contract: TokenContract) -> Tensor:
    """Log-probability of each whole answer, EOS included, (N,)."""
    logprobs = response_logprobs(policy, answers, vocab_size=contract.vocab_size)
    return masked_row_sums(logprobs, answers.action_mask)


@torch.no_grad()
def reference_logprobs(
    reference: nn.Module | None, policy: nn.Module, answers: Sequences, contract: TokenContract
) -> Tensor:
    """The same under the reference. None: the policy with its adapters off."""
    if reference is None:
        reference = WithoutAdapters(policy)
    return answer_logprobs(reference, answers, contract)
