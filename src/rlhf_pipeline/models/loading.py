"""Models from checkpoints, in the one form that all stages use: named precision, no dropout, no inherited sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_pipeline.config.training import Precision, Quantization
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.safe_loading import explained, loading_arguments
from rlhf_pipeline.models.scalar_head import HEAD, TokenScores, pretrained

M = TypeVar("M", bound=nn.Module)
DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def load_policy(
    checkpoint: Path,
    precision: Precision,
    *,
    quantize: Quantization | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal language model: the SFT model, actor or reference. Arguments: see `load_scores`."""
    with explained(checkpoint):
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint,
            dtype=DTYPES[precision],
            **loading_arguments(checkpoint, trust_remote_code=trust_remote_code),
            **_quantized(quantize, precision),
        )
    contract = TokenContract.read(checkpoint)
    # A hub model's own generation settings (top-k, repetition penalty) would change the distribution that is sampled.
    model.generation_config = GenerationConfig(
        eos_token_id=contract.eos_id, pad_token_id=contract.pad_id
    )
    return _without_dropout(model)


def load_scores(
    checkpoint: Path,
    precision: Precision,
    *,
    new_head: bool = False,
    foreign: bool = False,
    quantize: Quantization | None = None,
    trust_remote_code: bool = False,
) -> TokenScores:
    """A model with one scalar a token: the reward model or the critic.

    Args:
        checkpoint: a reward model; or a language model where `new_head` is true.
        precision: of weights and activations.
        new_head: the scalar head is not in the checkpoint; it gets random weights.
        quantize: how the matrices of the trunk are stored, if not in `precision`.
        foreign: it reads tokens of its own, so it needs no token contract.
        trust_remote_code: whether Python code that ships with the model may run.

    Raises:
        ArtifactError: the checkpoint has no trained scalar head, and none was asked for.
    """
    with explained(checkpoint):
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            checkpoint, num_labels=1, dtype=DTYPES[precision], output_loading_info=True,
            **loading_arguments(checkpoint, trust_remote_code=trust_remote_code), **_quantized(quantize, precision),
        )  # fmt: skip
    if missing := [
        name for name in loading["missing_keys"] if not (new_head and name.startswith(f"{HEAD}."))
    ]:
        raise ArtifactError(
            f"{checkpoint} is not a reward model: it has no weights for {', '.join(sorted(missing))}"
        )
    if not foreign:
        model.config.pad_token_id = TokenContract.read(checkpoint).pad_id
    if foreign and not isinstance(getattr(model, "score", None), nn.Linear):
        raise ArtifactError(
            f"{checkpoint} has no head `score` that reads each token; {type(model).__name__} cannot judge"
        )
    return TokenScores(_without_dropout(model))


def load_tokenizer(
    checkpoint: Path | str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer stored with a checkpoint, or with a model on the hub."""
    with explained(checkpoint):
        return AutoTokenizer.from_pretrained(
            checkpoint, revision=revision, trust_remote_code=trust_remote_code
        )


def freeze(model: M) -> M:
    """The model, for inference only."""
    return model.eval().requires_grad_(False)


def enable_checkpointing(model: nn.Module) -> None:
    """Keep one activation a layer, and compute the others again in the backward pass.

    Not by the reentrant method: after two forward passes before one backward it breaks ZeRO-2 and 3.
    """
    pretrained(model).activation_checkpointing_enable(
        activation_checkpointing_kwargs={"use_reentrant": False}
    )


def assert_no_dropout(model: nn.Module) -> None:
    """Raise `AssertionError` if a forward pass could differ from the next: a policy ratio would not start at 1."""
    active = [f"{path}.{name}" for path, _, name in _dropout_rates(model)]
    assert not active, f"dropout is active in {', '.join(active)}"


def _quantized(quantize: Quantization | None, precision: Precision) -> dict[str, Any]:
    """Arguments of `from_pretrained` by which bitsandbytes stores matrices in 4 bits; heads stay as they are."""
    if quantize is None:
        return {}
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quantize,
            bnb_4bit_compute_dtype=DTYPES[precision],
            llm_int8_skip_modules=[
                HEAD,
                "lm_head",
                "embed_out",
            ],  # their name in GPT-NeoX; the argument serves 4 bits too
        )
    }


def _without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    for _, module, name in _dropout_rates(model):
        setattr(module, name, 0.0)
    return model


def _dropout_rates(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Path, module and attribute of every rate above 0 by which activations or layers are dropped.

    It is `p` of a dropout module. Modules that call the function keep it under a name of the family's choice: `dropout`
    and `layerdrop` in OPT, `hidden_dropout` in BLOOM, `attention_dropout` in Llama.
    """
    return [
        (path, module, name)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if ("drop" in name or name == "p") and isinstance(value, float) and value > 0
    ]
