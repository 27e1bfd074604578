"""Losses. Shapes: B sequences, R response tokens, N comparisons."""

import torch


def gspo(logprobs, old_logprobs, advantages, mask, clip_range):
    """PPO's loss with one ratio for each sequence (Zheng et al. 2025)."""
    lengths = mask.sum(1).clamp(min=1)
    ratio = (torch.where(mask, logprobs - old_logprobs, 0.0).sum(1) / lengths).exp()
    advantage = torch.where(mask, advantages, 0.0).sum(1) / lengths
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return -torch.minimum(ratio * advantage, clipped * advantage).sum(), mask.any(1).sum()


def hinge(chosen_scores, rejected_scores, margin=1.0):
    """Penalize comparisons that are not ranked with a margin (Zhao et al. 2023)."""
    short = (margin - (chosen_scores - rejected_scores)).clamp(min=0)
    return short.sum(), short.numel()


def apo_zero(chosen_log_ratios, rejected_log_ratios, beta):
    """APO: raise chosen answers, lower rejected ones (D'Oosterlinck et al. 2024)."""
    losses = (-beta * chosen_log_ratios).sigmoid() + (beta * rejected_log_ratios).sigmoid()
    return losses.sum(), losses.numel()
