from __future__ import annotations

import torch

from rlhf_pipeline.rl.sft_loss import sft_loss

NAN = float("nan")
MASK = torch.tensor([[True, True, False], [True, False, False], [True, True, False]])
# 5 real tokens, 1 + 2 + 4 + 3 + 5 = 15 nats.
LOGPROBS = torch.tensor([[-1.0, -2.0, NAN], [-4.0, NAN, NAN], [-3.0, -5.0, NAN]])


def test_sft_loss_is_the_mean_over_real_tokens():
    logprobs = LOGPROBS.clone().requires_grad_()
    loss = sft_loss(logprobs, MASK, normalizer=5)
    torch.testing.assert_close(loss.detach(), torch.tensor(3.0))
    loss.backward()
    torch.testing.assert_close(
        logprobs.grad, torch.tensor([[-0.2, -0.2, 0.0], [-0.2, 0.0, 0.0], [-0.2, -0.2, 0.0]])
    )


def test_sft_loss_adds_up_over_unequal_micro_batches():
    parts = [
        sft_loss(LOGPROBS[rows], MASK[rows], normalizer=torch.tensor(5))
        for rows in (slice(2), slice(2, 3))
    ]
    # (1 + 2 + 4) / 5 and (3 + 5) / 5
    torch.testing.assert_close(torch.stack(parts), torch.tensor([1.4, 1.6]))
