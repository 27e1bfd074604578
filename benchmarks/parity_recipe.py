"""What both sides of the parity benchmark train with: one recipe, in the words of either side.

`ours` gives the parameter block of a stage, `trl` the arguments of a trainer. A number stands in
one place only, in `RECIPES` or in a constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STEPS = 100
"""Rollouts of PPO, GRPO and RLOO; batches of DPO and KTO."""
BATCH = 32
"""Responses of a rollout; pairs or answers of a batch."""
RESPONSE_TOKENS = 16
BETAS, EPS = (0.9, 0.95), 1e-8
CLIP, GAMMA, LAM = 0.2, 1.0, 0.95
NO_CLIP = 1e9
"""A gradient norm that no step reaches. TRL's PPO never clips gradients. TRL's RLOO sums over the
tokens of a response, and this project divides by their number, so one bound would mean two."""


@dataclass(frozen=True)
class Recipe:
    """The numbers that differ between the methods."""

    learning_rate: float
    kl_coef: float
    """DPO and KTO: beta."""
    responses_per_prompt: int = 1
    epochs: int = 1
    """Passes over the responses of a rollout."""
    minibatches: int = 1
    """Optimizer steps of each pass."""
    max_grad_norm: float = 1.0
    lora: bool = False
    """Adapters of rank 8 beside matrices in bf16, in place of all weights in fp32."""
    ranks: int = 1


RECIPES = {
    "ppo": Recipe(1e-3, 0.05, epochs=2, minibatches=2, max_grad_norm=NO_CLIP),
    "grpo": Recipe(5e-4, 0.2, responses_per_prompt=4, epochs=2),
    "rloo": Recipe(1e-3, 0.05, responses_per_prompt=4, max_grad_norm=NO_CLIP),
    "dpo": Recipe(3e-4, 0.1),
    "kto": Recipe(3e-4, 0.1),
    "dpo_lora": Recipe(2e-3, 0.1, lora=True),
    "dpo_ranks": Recipe(3e-4, 0.1, ranks=2),
    "distill": Recipe(3e-4, 1.0),
}
"""By name: a method, or a method with an underscore and what differs."""
ON_ROWS = ("dpo", "kto")
"""Methods without rollouts."""
LORA_RANK, LORA_ALPHA = 8, 16
DISTILL_BETA = 1.0


def base(name: str) -> str:
    """The method of a recipe."""
    return name.partition("_")[0]


def ours_distilled(policy: dict[str, Any]) -> dict[str, Any]:
    """The block `distill`; its program finds the teacher among its inputs."""
    return policy | {"teacher": "teacher", "beta": DISTILL_BETA, "kl": {"coef": 1.0}}


def trl_distilled(common: dict[str, Any]) -> dict[str, Any]:
    """The arguments of DistillationConfig."""
    return common | {
        "max_steps": STEPS, "beta": DISTILL_BETA, "temperature": 1.0, "shuffle_dataset": False,
        "max_completion_length": RESPONSE_TOKENS,
    }  # fmt: skip


def ours(method: str, rows: int) -> dict[str, Any]:
    """The parameter block of `ppo`, `grpo` (also for RLOO), `dpo` or `kto`; `rows`: the training
    pairs or answers of the last two."""
    recipe, method = RECIPES[method], base(method)
    optimizer = {
        "learning_rate": recipe.learning_rate, "schedule": "constant", "warmup_fraction": 0.0,
        "weight_decay": 0.0, "betas": BETAS, "eps": EPS, "max_grad_norm": recipe.max_grad_norm,
    }  # fmt: skip
    model = {"optimizer": optimizer, "deepspeed": {"zero_stage": 0, "precision": "fp32"}}
    if recipe.lora:
        model["lora"] = {"rank": LORA_RANK, "alpha": LORA_ALPHA}
        model["deepspeed"] = {"zero_stage": 1, "precision": "bf16"}
    common = {"evaluations": 1, "micro_batch_tokens": 100_000}
    if method in ON_ROWS:
        epochs = STEPS * BATCH / rows
        return model | common | {"beta": recipe.kl_coef, "batch_size": BATCH, "epochs": epochs}
    policy = common | {
        "actor": model, "steps": STEPS, "rollout_batch_size": BATCH,
        "minibatch_size": BATCH // recipe.minibatches, "ppo_epochs": recipe.epochs,
        "responses_per_prompt": recipe.responses_per_prompt, "clip_range": CLIP,
        "kl": {"coef": recipe.kl_coef, "place": "loss" if method == "grpo" else "reward"},
        "sampling": {"temperature": 1.0, "max_response_tokens": RESPONSE_TOKENS},
        "missing_eos_penalty": 0.0, "evaluation_prompts": BATCH,
    }  # fmt: skip
    if method == "ppo":
        of_critic = {"critic": model, "value_clip_range": CLIP, "gamma": GAMMA, "lam": LAM}
        return policy | of_critic | {"score_clip": None, "whiten_rewards": False}
    if method == "distill":
        return ours_distilled(policy)
    policy["rewards"] = [{"callable": "parity_task:reward"}]
    if method == "rloo":
        return policy | {"advantage": "rloo", "denominator": "constant"}
    return policy | {"scale_rewards": "group", "denominator": "tokens"}


def trl(method: str, folder: str, seed: int) -> dict[str, Any]:
    """The arguments of PPOConfig, GRPOConfig, RLOOConfig, DPOConfig or KTOConfig."""
    recipe, method = RECIPES[method], base(method)
    common = {
        "output_dir": folder, "seed": seed, "per_device_train_batch_size": BATCH // recipe.ranks,
        "learning_rate": recipe.learning_rate, "lr_scheduler_type": "constant",
        "weight_decay": 0.0, "adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "adam_epsilon": EPS,
        "max_grad_norm": recipe.max_grad_norm, "bf16": recipe.lora, "gradient_checkpointing": False,
        "use_cpu": True, "save_strategy": "no", "report_to": "none", "logging_steps": 1,
        "disable_tqdm": True,
    }  # fmt: skip
    if method in ON_ROWS:
        return common | {"max_steps": STEPS, "beta": recipe.kl_coef}
    if method == "distill":
        return trl_distilled(common)
    if method == "ppo":
        return common | {
            "gradient_accumulation_steps": 1,  # with more, it steps once for several minibatches
            "num_mini_batches": recipe.minibatches, "num_ppo_epochs": recipe.epochs,
            "local_rollout_forward_batch_size": BATCH, "total_episodes": STEPS * BATCH,
            "response_length": RESPONSE_TOKENS, "stop_token": "eos", "missing_eos_penalty": None,
            "temperature": 1.0, "num_sample_generations": 0, "kl_coef": recipe.kl_coef,
            "kl_estimator": "k1", "cliprange": CLIP, "cliprange_value": CLIP, "gamma": GAMMA,
            "lam": LAM, "whiten_rewards": False,
        }  # fmt: skip
    policy = common | {
        "max_steps": STEPS * recipe.epochs, "num_iterations": recipe.epochs,
        "num_generations": recipe.responses_per_prompt, "beta": recipe.kl_coef, "epsilon": CLIP,
        "max_completion_length": RESPONSE_TOKENS, "temperature": 1.0, "shuffle_dataset": False,
    }  # fmt: skip
    if method == "rloo":
        return policy | {"normalize_advantages": False}
    kl = {"use_bias_correction_kl": True}
    return policy | kl | {"loss_type": "dapo", "scale_rewards": "group"}
