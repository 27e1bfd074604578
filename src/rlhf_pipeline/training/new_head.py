from pathlib import Path
from typing import Any

from torch import nn

from rlhf_pipeline.config.block import Precision
from rlhf_pipeline.distributed.zero import gathered
from rlhf_pipeline.models.scalar_head import TokenScores, load_scores


def untrained(sft_model: Path, precision: Precision, **how: Any) -> TokenScores:
    """The SFT model with a new scalar head; all ranks draw the same one. See `load_scores`.

    Its standard deviation is 1 / sqrt(d + 1) for width d (Huang et al., 2024, arXiv 2403.17031):
    a head of zeros would at first give the other weights no gradient.
    """
    model = load_scores(sft_model, precision, new_head=True, **how)
    with gathered(model.head.parameters()):
        nn.init.normal_(model.head.weight, std=(model.head.in_features + 1) ** -0.5)
    return model
