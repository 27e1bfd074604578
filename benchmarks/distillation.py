"""How noisy is the gradient of a distillation, and does the student learn?

    kedro run --pipeline=full           # the student is its SFT model, the teacher its PPO policy
    python benchmarks/distillation.py   # a minute; --data FOLDER for another project

Each loss has the gradient of the same answers of the student, batch by batch: the divergences of
whole distributions, and the reverse KL of sampled tokens alone, which is REINFORCE with the
advantage log p_teacher - log p_student. With batches i of n, their gradients g_i and mean g,

    noise = sum_i |g_i - g|^2 / (n - 1)      signal = |g|^2 - noise / n

are unbiased estimates of the squared noise of one batch and of the squared mean.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from experiments import commit
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlhf_pipeline.config.policies import DistillConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.models.forward import response_divergences, response_logprobs
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training.ppo_setup import Setup, set_up
from rlhf_pipeline.training.rollouts import roll_out, training_prompts

LOSSES: dict[str, tuple[float, int | None, bool]] = {
    "reverse KL of sampled tokens": (1.0, None, True),
    "reverse KL": (1.0, None, False),
    "reverse KL, 16 tokens apart": (1.0, 16, False),
    "JSD, beta 0.5": (0.5, None, False),
    "forward KL": (0.0, None, False),
}
"""beta, top_k, and whether the sampled token alone counts."""


def main() -> None:
    """Measure the gradients; print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--answers", type=int, default=64, help="of a batch")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        setup = prepared(options.data, options.answers, Path(folder))
        found: dict[str, list[Tensor]] = {name: [] for name in LOSSES}
        for step in range(1, options.batches + 1):
            rollout = roll_out(setup, *training_prompts(setup, step), step)
            for name, gradients in found.items():
                gradients.append(gradient(setup, rollout.sequences, *LOSSES[name]))
    table = Table(title=f"{options.batches} batches of {options.answers} answers, {commit()}")
    for column in ("loss", "noise / signal", "cosine of the mean with the first one"):
        table.add_column(column, justify="right")
    first = torch.stack(found[next(iter(LOSSES))]).mean(0)
    for name, gradients in found.items():
        every = torch.stack(gradients)
        mean = every.mean(0)
        noise = (every - mean).square().sum() / (len(every) - 1)
        signal = mean.square().sum() - noise / len(every)
        cosine = torch.cosine_similarity(first, mean, dim=0)
        table.add_row(name, f"{noise / signal:.3f}", f"{cosine:.2f}")
    Console(width=100).print(table)


def prepared(data: Path, answers: int, folder: Path) -> Setup:
    """The newest SFT model and PPO policy of a project, as student and teacher."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    inputs = {
        "sft_model": newest(data, "sft_model"),
        "teacher": newest(data, "ppo_model"),
        "prompts": newest(data, "split") / "ppo",
    }
    config = DistillConfig.model_validate(
        {
            "teacher": str(inputs["teacher"]),
            "rollout_batch_size": answers,
            "minibatch_size": answers,
            "sampling": {"max_response_tokens": 48},
            "generator": "transformers",
        }
    )
    job = LaunchedJob("distill", "f", 1, {}, inputs, {}, folder, 3600.0)
    return set_up(job, config, TokenContract.read(inputs["sft_model"]), join(1, timeout_s=600))


def newest(data: Path, name: str) -> Path:
    """The newest artifact of a data set, such as data/06_models/ppo_model/VERSION/ppo_model."""
    if not (found := sorted(data.glob(f"0*/{name}/*/{name}"))):
        raise SystemExit(f"{data}: found no {name}. Fix: kedro run --pipeline=full")
    return found[-1]


def gradient(
    setup: Setup, answers: Sequences, beta: float, top_k: int | None, sampled: bool
) -> Tensor:
    """The gradient of the mean over all tokens, as one vector."""
    models, mask = setup.models, answers.action_mask
    logprobs, _, away, of_teacher = response_divergences(
        models.actor.module, models.reference, answers, beta=beta, top_k=top_k,
        vocab_size=models.contract.vocab_size,
    )  # fmt: skip
    if sampled:
        logprobs = response_logprobs(
            models.actor.module, answers, vocab_size=models.contract.vocab_size
        )
        away = (logprobs - of_teacher).detach() * logprobs
    parameters = list(models.actor.module.parameters())
    gradients = torch.autograd.grad(away[mask].mean(), parameters)
    return torch.cat([each.flatten() for each in gradients])


if __name__ == "__main__":
    main()
