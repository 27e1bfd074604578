"""The loss of a distillation: teacher and student of a micro batch side by side."""

from torch import Tensor

from rlhf_pipeline.config.policies import DistillConfig
from rlhf_pipeline.distributed.optimizer_step import Sums
from rlhf_pipeline.models.forward import response_divergences
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.rl.losses import Reduce
from rlhf_pipeline.training.ppo_setup import PPOModels


def divergence_loss(
    models: PPOModels, rows: Sequences, config: DistillConfig, reduce: Reduce
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of the divergences at the chosen tokens of rows on the device, times `kl.coef`.

    Also log-probabilities and entropies of the student and the teacher's log-probabilities, (B, R)
    each, without a gradient unless `entropy_coef` gives the entropies one.
    """
    logprobs, entropy, away, of_teacher = response_divergences(
        models.actor, models.reference, rows, beta=config.beta, count=config.top_k,
        entropy_trains=config.entropy_coef > 0, vocab_size=models.contract.vocab_size,
        temperature=config.sampling.temperature,
    )  # fmt: skip
    total, _ = reduce(away, rows.action_mask)
    return config.kl.coef * total, logprobs, entropy, of_teacher


def given_loss(
    models: PPOModels,
    rows: Sequences,
    config: DistillConfig,
    tokens: Tensor,
    terms: Tensor,
    reduce: Reduce,
) -> tuple[Tensor, Sums]:
    """The loss of demonstrations. `tokens` and `terms`, which divides it, are those of the step."""
    rows = rows.to(models.actor.device)
    total, *_ = divergence_loss(models, rows, config, reduce)
    loss = total / terms
    return loss, {"given/loss": loss * tokens, "given/count": rows.action_mask.sum()}
