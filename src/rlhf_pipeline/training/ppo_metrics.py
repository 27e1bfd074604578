"""Metrics of a rollout, and the faults that leave nothing to learn from it."""

from typing import Any

import torch

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.data.records import dialogue
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.generation.records import Scored, response_texts
from rlhf_pipeline.rl.masking import masked_sum
from rlhf_pipeline.rl.rewards import kl_estimate
from rlhf_pipeline.training.experience import equal_groups, sampler_weights_of, training_scores
from rlhf_pipeline.training.ppo_setup import Setup, ppo_advice

OF_EPISODES = {
    "turns": "turns",
    "calls": "calls",
    "malformed_calls": "malformed",
    "failed_calls": "failed",
}
"""Metrics of episodes, as numbers for each; and the fields of their records."""


def rollout_metrics(
    scored: Scored, config: PPOConfig, world: World, *, held_out: bool = False
) -> dict[str, float]:
    """Means over the responses of all ranks. Held-out prompts have one response each."""
    scores = training_scores(scored, config)
    assert scored.clipped_scores is not None, "`RewardSum` has clipped them"
    clipped = scored.scores.ne(scored.clipped_scores)
    mask = scored.sequences.action_mask
    own = {
        "responses": torch.tensor(float(len(scores))),
        "score": scored.scores.sum().double(),
        "shaped": scores.sum().double(),
        "clipped": clipped.sum().double(),
        "tokens": mask.sum().double(),
        "ended": scored.ended.sum().double(),
        **{f"reward/{name}": part.sum().double() for name, part in scored.parts.items()},
        **{f"replies/{name}": torch.tensor(float(n)) for name, n in scored.replies.items()},
        **{
            f"rollout/{name}": torch.tensor(float(sum(getattr(e, field) for e in episodes)))
            for name, field in OF_EPISODES.items()
            if (episodes := scored.episodes) is not None
        },
    }
    in_update = config.logprobs_in_update and not held_out
    if held_out or not (config.has_teacher or in_update):
        k3 = kl_estimate(scored.logprobs, scored.ref_logprobs, "k3")
        own |= {"kl": scored.kl.sum().double(), "kl_k3": masked_sum(k3, mask).double()}
    if scored.values is not None:
        own["values"] = masked_sum(scored.values, mask).double()
    if config.rewards and config.responses_per_prompt > 1 and not held_out:
        own["rollout/equal_groups"] = equal_groups(scored, config).double().mean() * len(scores)
    weights = None
    if not (held_out or in_update):
        weights = sampler_weights_of(scored.logprobs, scored.sampler_logprobs, mask, config)
    if weights is not None:
        weights = weights.double()
        own |= {"weight": weights.sum(), "weight_squared": weights.square().sum()}
    sums = world.sums(own)
    count = sums["responses"]
    of_rewards = {
        "objective/score": sums["score"] / count,
        "objective/shaped_score": sums["shaped"] / count,
        "objective/clipped_fraction": sums["clipped"] / count,
    }
    effective = {}
    if "weight" in sums:  # Kish's effective sample size of the importance weights
        squares = sums["tokens"] * sums["weight_squared"]
        size = sums["weight"] ** 2 / squares if squares else 0.0
        effective["rollout/effective_sample_size"] = size
    kl = sums.get("kl", 0.0)
    of_kl = {
        "objective/kl": kl / count,
        "objective/kl_k3": sums.get("kl_k3", 0.0) / count,
        "objective/rlhf_reward": (sums["shaped"] - config.kl.coef * kl) / count,
    }
    return {
        **(of_rewards if config.rewards else {}),
        **(of_kl if "kl" in sums else {}),
        "rollout/response_tokens": sums["tokens"] / count,
        "rollout/eos_fraction": sums["ended"] / count,
        **{name: value / count for name, value in sums.items() if "/" in name},
        **({"value/mean": sums["values"] / sums["tokens"]} if "values" in sums else {}),
        **effective,
    }


def quality_metrics(rows: dict[str, list[Any]], scored: Scored, setup: Setup) -> dict[str, float]:
    """Gold score, and strict and lenient accuracy (`scoring.true_answers.accuracy`), as means over
    all ranks; each of them only if it is known for every prompt."""
    # Only an evaluation needs them, so a rank starts without them.
    from rlhf_pipeline.data.sources.synthetic import gold_score
    from rlhf_pipeline.scoring.true_answers import accuracy

    said = response_texts(scored, setup.models.tokenizer)
    right = [each or (None, None) for each in map(accuracy, rows["reference"], said)]
    of_split = setup.config.environment is None  # it knows the quality of its own prompts alone
    sources = rows["source"] if of_split else [None] * len(said)
    columns = {
        "gold_score": list(map(gold_score, sources, rows["messages"], said)),
        "accuracy": [strict for strict, _ in right],
        "accuracy_lenient": [lenient for _, lenient in right],
    }
    known = [[value for value in column if value is not None] for column in columns.values()]
    counts = torch.tensor([[sum(own), len(own), len(said)] for own in known]).double()
    sums = zip(columns, setup.world.sum(counts).tolist(), strict=True)
    return {f"objective/{name}": total / n for name, (total, own, n) in sums if own == n}


def sampled_answers(
    rows: dict[str, list[Any]], scored: Scored, setup: Setup, count: int
) -> list[dict[str, Any]]:
    """The answers to the first `count` prompts of all ranks, in order, as JSON types; the scores
    are named like the metrics."""
    world, tokenizer = setup.world, setup.models.tokenizer
    said, asked = response_texts(scored, tokenizer), rows["messages"]
    if scored.episodes is not None:
        said = [episode.text for episode in scored.episodes]
        asked = [episode.prompt for episode in scored.episodes]
    values = {"score": scored.scores} if setup.config.rewards else {}
    values |= {f"reward/{name}": part for name, part in scored.parts.items()} | {"kl": scored.kl}
    own = [
        {"prompt": dialogue(asked[place]), "answer": said[place].strip()}
        | {name: round(float(value[place]), 4) for name, value in values.items()}
        for place in range(len(range(world.rank, count, world.size)))
    ]
    gathered = world.gather(own)  # rank r of W has the slots r, r + W, ...
    return [gathered[slot % world.size][slot // world.size] for slot in range(count)]


def rollout_fault(
    metrics: dict[str, float], config: PPOConfig, where: str, *, trained: bool
) -> str | None:
    """Why a rollout, which `where` names, contains nothing to learn from, or None.

    `trained`: the actor has taken an optimizer step; otherwise it is the SFT model. With a teacher,
    the metrics contain a KL only after the update.
    """
    kl, bound = metrics.get("objective/kl", 0.0), config.kl.explosion
    if bound is not None and not kl <= bound:  # `kl > bound` would miss NaN
        return (
            f"objective/kl: found {kl:.4g} nats per response {where}, expected at most "
            f"{config.stage}.kl.explosion ({bound:g}). The actor is too far from the reference. "
            f"Fix: {ppo_advice('objective/kl', config)}"
        )
    # An EOS ends a response and counts as one of its tokens.
    if metrics["rollout/response_tokens"] != metrics["rollout/eos_fraction"]:
        return None
    cause = (
        f"the actor has learned to end at once because {config.stage}.rewards prefers that. Fix: "
        f"raise {config.stage}.kl.coef ({config.kl.coef:g}), or check the scores of short answers"
        if trained
        else "the SFT model ends at once. Fix: check its demonstrations, and whether the chat "
        "template ends a prompt with EOS"
    )
    if trained and config.has_teacher:
        cause = "the actor has learned to end at once. Fix: check whether its teacher does"
    return f"every response is empty {where}: {cause}"


def sampler_fault(metrics: dict[str, float], config: PPOConfig, step: int) -> str | None:
    """Why the responses of a step are not the actor's, or None. `metrics` are of the update."""
    gap, bound = metrics.get("rollout/logprob_gap"), config.maximum_logprob_gap
    if gap is None or bound is None or not gap > bound:
        return None
    return (
        f"rollout/logprob_gap: found {gap:.4g} nats per token at step {step}, expected at most "
        f"{config.stage}.maximum_logprob_gap ({bound:g}). The responses do not come from the "
        f"actor. Fix: set {config.stage}.generator to transformers, or "
        f"{config.stage}.actor.deepspeed.precision ({config.actor.deepspeed.precision}) to fp32"
    )
