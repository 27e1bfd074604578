"""The frozen start of a policy in training, which DPO and KTO compare it with."""

from functools import partial

import torch
from torch import Tensor, nn

from rlhf_pipeline.config.preferences import ReferencedConfig
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
    """The input `reference`, or else the start of the policy, frozen; None if the stage needs no
    model of its own."""
    folder = job.inputs.get("reference", job.inputs["sft_model"])
    if "reference" not in job.inputs and not config.loads_reference:
        return None
    load = partial(load_policy, folder, trust_remote_code=job.trust_remote_code)
    return frozen_model(load, config.reference.beside(config.deepspeed), world)


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
