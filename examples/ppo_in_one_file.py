"""PPO on one page, as the program `rlhf_pipeline.training.ppo` computes it on one rank.

    python examples/ppo_in_one_file.py SFT_MODEL REWARD_MODEL PROMPTS.txt POLICY

SFT_MODEL and REWARD_MODEL are folders of models with one tokenizer, PROMPTS.txt has a prompt in
each line, and POLICY is the folder to write. The math is that of `rl/`; everything else is torch
and transformers. The program adds ranks, ZeRO, packing, LoRA, checkpoints, held-out evaluations,
adaptive KL, and other rewards, losses and advantages.

Shapes: B prompts with one response each, P prompt tokens (left-padded), R response tokens
(right-padded), T = P + R.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from rlhf_pipeline.rl.advantages import gae
from rlhf_pipeline.rl.logprobs import logprobs_of, position_ids, sampled
from rlhf_pipeline.rl.losses import policy_loss, value_loss
from rlhf_pipeline.rl.masking import masked_moments, mean_and_variance, whiten
from rlhf_pipeline.rl.rewards import per_token_rewards, shaped_scores


@dataclass(frozen=True)
class Settings:
    """Parameters of `ppo`, by their names there."""

    steps: int = 100
    rollout_batch_size: int = 64
    max_response_tokens: int = 64
    ppo_epochs: int = 1
    learning_rate: float = 1e-5
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    kl_coef: float = 0.1
    gamma: float = 1.0
    lam: float = 0.95
    clip_range: float = 0.2
    value_clip_range: float = 0.2
    score_clip: float = 5.0
    missing_eos_penalty: float = 1.0


def logits_of(model: Any, ids: Tensor, real: Tensor) -> Tensor:
    """The logits after each token, (B, T, V)."""
    return model(ids, attention_mask=real, position_ids=position_ids(real)).logits


def logprobs(model: Any, ids: Tensor, real: Tensor, count: int) -> Tensor:
    """The log-probabilities of the last `count` tokens, (B, R)."""
    return logprobs_of(logits_of(model, ids, real)[:, -count - 1 : -1], ids[:, -count:])


def scalars(model: Any, ids: Tensor, real: Tensor) -> Tensor:
    """The scalar of a reward model or a critic after each token, (B, T)."""
    inputs = {"attention_mask": real, "position_ids": position_ids(real)}
    return model.score(model.base_model(ids, **inputs)[0]).squeeze(-1)


@torch.no_grad()
def respond(
    actor: Any, prompts: list[list[int]], draws: Tensor, pad: int, eos: int
) -> tuple[Tensor, Tensor]:
    """Sample responses by uniform numbers (B, R); return all tokens and which are real, (B, T)."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    real = torch.tensor([[p >= width - len(prompt) for p in range(width)] for prompt in prompts])
    running = torch.ones(len(prompts), dtype=torch.bool)
    for draw in draws.unbind(1):
        logits = logits_of(actor, ids, real)[:, -1]
        tokens, _ = sampled(logits, draw, temperature=1.0, vocab_size=logits.shape[-1])
        ids = torch.cat([ids, torch.where(running, tokens, pad)[:, None]], 1)
        real = torch.cat([real, running[:, None]], 1)
        running = running & (tokens != eos)
        if not running.any():
            break
    return ids, real


def train(
    sft_model: str | Path,
    reward_folder: str | Path,
    batches: Iterable[list[list[int]]],
    draws: Callable[[int], Tensor],
    pad: int,
    eos: int,
    settings: Settings,
) -> tuple[Any, Any]:
    """Train for as many steps as there are batches of prompts; return actor and critic.

    `draws` gives the uniform numbers of a step, (B, R), which decide what is sampled.
    """
    policy, scorer = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSequenceClassification,
    )
    actor, reference, critic, reward_model = (
        kind.from_pretrained(folder, dtype=torch.float32).eval()  # no dropout
        for kind, folder in ((policy, sft_model),) * 2 + ((scorer, reward_folder),) * 2
    )
    trained, optimizers, schedules = (actor, critic), [], []
    for model in trained:
        adam = torch.optim.AdamW(
            model.parameters(), settings.learning_rate, (0.9, 0.95), settings.eps, weight_decay=0.0
        )
        steps = settings.steps * settings.ppo_epochs
        optimizers.append(adam)
        schedules.append(transformers.get_cosine_schedule_with_warmup(adam, 0, steps))
    mean, value_offset = getattr(reward_model.config, "score_mean", 0.0), 0.0
    for step, prompts in enumerate(batches, start=1):
        # 1. Sample a response to each prompt.
        ids, real = respond(actor, prompts, draws(step), pad, eos)
        width = max(map(len, prompts))
        mask, count = real[:, width:], ids.shape[1] - width
        # 2. Score the responses by all four models.
        with torch.no_grad():
            old_logprobs = logprobs(actor, ids, real, count)
            ref_logprobs = logprobs(reference, ids, real, count)
            old_values = scalars(critic, ids, real)[:, -count - 1 : -1] + value_offset
            last = width + mask.sum(1, keepdim=True) - 1
            scores = scalars(reward_model, ids, real).gather(1, last).squeeze(1) - mean
        scores = shaped_scores(
            scores.clamp(-settings.score_clip, settings.score_clip),
            ids.gather(1, last).squeeze(1) == eos,
            mask.sum(1),
            missing_eos_penalty=settings.missing_eos_penalty,
        )
        # 3. Compute rewards, returns and the advantage of each token.
        rewards = per_token_rewards(
            scores, old_logprobs, ref_logprobs, mask, kl_coef=settings.kl_coef
        )
        if step == 1:  # values start with the mean of the first returns
            none = torch.zeros_like(rewards)
            _, returns = gae(rewards, none, mask, gamma=settings.gamma, lam=1.0)
            value_offset = float(mean_and_variance(masked_moments(returns - old_values, mask))[0])
            old_values = old_values + value_offset
        advantages, returns = gae(rewards, old_values, mask, gamma=settings.gamma, lam=settings.lam)
        advantages = whiten(advantages, mask, masked_moments(advantages, mask))
        # 4. Update actor and critic.
        for _ in range(settings.ppo_epochs):
            new = logprobs(actor, ids, real, count)
            values = scalars(critic, ids, real)[:, -count - 1 : -1] + value_offset
            clip, value_clip = settings.clip_range, settings.value_clip_range
            losses = [
                policy_loss(new, old_logprobs, advantages, mask, clip_range=clip),
                value_loss(values, old_values, returns, mask, clip_range=value_clip),
            ]
            for model, adam, schedule, (loss, terms) in zip(
                trained, optimizers, schedules, losses, strict=True
            ):
                (loss / terms).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
                adam.step()
                adam.zero_grad()
                schedule.step()
        kl = float(torch.where(mask, old_logprobs - ref_logprobs, 0.0).sum(1).mean())
        print(f"step {step} of {settings.steps}: score {float(scores.mean()):.3f}, KL {kl:.3f}")
    return actor, critic


def main(sft_model: str, reward_model: str, prompts: str, policy: str) -> None:
    """Train with the settings above, and write the policy."""
    settings, generator = Settings(), torch.Generator().manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(sft_model)
    lines = Path(prompts).read_text(encoding="utf-8").splitlines()
    dialogues = [[{"role": "user", "content": line}] for line in lines if line.strip()]
    rows = tokenizer.apply_chat_template(dialogues, add_generation_prompt=True)["input_ids"]
    shape = settings.rollout_batch_size, settings.max_response_tokens

    def batches() -> Iterator[list[list[int]]]:
        for _ in range(settings.steps):
            chosen = torch.randint(len(rows), shape[:1], generator=generator)
            yield [rows[number] for number in chosen]

    actor, _ = train(
        sft_model, reward_model, batches(), lambda _: torch.rand(shape, generator=generator),
        tokenizer.pad_token_id, tokenizer.eos_token_id, settings,
    )  # fmt: skip
    actor.save_pretrained(policy)
    tokenizer.save_pretrained(policy)


if __name__ == "__main__":
    main(*sys.argv[1:])
