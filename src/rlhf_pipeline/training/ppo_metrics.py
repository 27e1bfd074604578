from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.data.sources.synthetic import gold_score
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.rollout.scoring import Scored
from rlhf_pipeline.training.experience import groups, training_scores


def rollout_metrics(
    scored: Scored, config: PPOConfig, world: World, *, held_out: bool = False
) -> dict[str, float]:
    """Means over the responses of all ranks. Held-out prompts have one response each."""
    scores = training_scores(scored, config)
    assert scored.clipped_scores is not None, "`RewardSum` has clipped them"
    clipped = scored.scores.ne(scored.clipped_scores)
    own = scored.sums() | {"shaped": scores.sum().double(), "clipped": clipped.sum().double()}
    if config.responses_per_prompt > 1 and not held_out:
        of_group = groups(scores, config)
        own["rollout/equal_groups"] = (of_group == of_group[0]).all(0).double().mean() * len(scores)
    sums = world.sums(own)
    count = sums["responses"]
    return {
        "objective/score": sums["score"] / count,
        "objective/shaped_score": sums["shaped"] / count,
        "objective/clipped_fraction": sums["clipped"] / count,
        "objective/kl": sums["kl"] / count,
        "objective/kl_k3": sums["kl_k3"] / count,
        "objective/rlhf_reward": (sums["shaped"] - config.kl.coef * sums["kl"]) / count,
        "rollout/response_tokens": sums["tokens"] / count,
        "rollout/eos_fraction": sums["ended"] / count,
        **{name: value / count for name, value in sums.items() if "/" in name},
        **({"value/mean": sums["values"] / sums["tokens"]} if "values" in sums else {}),
    }


def gold_metrics(
    rows: dict[str, list[Any]],
    sequences: Sequences,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
) -> dict[str, float]:
    """The mean gold score over all ranks; empty unless it is known for every prompt."""
    texts = tokenizer.batch_decode(sequences.response_ids, skip_special_tokens=True)
    gold = [g for g in map(gold_score, rows["source"], rows["messages"], texts) if g is not None]
    counts = torch.tensor([sum(gold), len(texts) - len(gold), len(texts)]).double()
    total, unknown, count = world.sum(counts).tolist()
    return {} if unknown else {"objective/gold_score": total / count}


def held_out_name(metric: str) -> str:
    """The name of a rollout's metric under the prefix of held-out metrics."""
    return metric.removeprefix("objective/").removeprefix("rollout/")
