"""Load models the way all stages use them: explicit precision, no dropout, plain sampling."""

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.config.block import Precision, Quantization
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.models.lean_transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from rlhf_pipeline.models.logprob_head import install
from rlhf_pipeline.models.packing import use_packed_attention
from rlhf_pipeline.models.safe_loading import explain_loading_errors, loading_arguments

M = TypeVar("M", bound=nn.Module)
HEAD = "score"
"""Attribute of a sequence classifier: the layer from hidden states to scalars."""
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
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a causal language model: SFT model, actor or reference. Arguments: see
    `rlhf_pipeline.models.scalar_head.load_scores`."""
    with explain_loading_errors(checkpoint):
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint,
            dtype=DTYPES[precision],
            **loading_arguments(checkpoint, trust_remote_code=trust_remote_code, device=device),
            **quantization(quantize, precision),
        )
    model.generation_config = plain_generation(TokenContract.read(checkpoint))
    install(model)
    use_packed_attention(model)
    return without_dropout(model)


def saved_precision(checkpoint: Path) -> Precision:
    """The precision that a checkpoint was saved in, by its config.json; fp32 if it is unknown."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    name = config.get("dtype") or config.get("torch_dtype")
    return next((own for own, dtype in DTYPES.items() if str(dtype) == f"torch.{name}"), "fp32")


def plain_generation(contract: TokenContract) -> GenerationConfig:
    """Generation that stops at every EOS and samples from the model's own distribution.

    A hub model's settings (top-k, repetition penalty) would change that distribution.
    """
    return GenerationConfig(eos_token_id=contract.eos_token_id, pad_token_id=contract.pad_id)


def load_tokenizer(
    checkpoint: Path | str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder or of a model on the hub."""
    with explain_loading_errors(checkpoint):
        return AutoTokenizer.from_pretrained(
            checkpoint, revision=revision, trust_remote_code=trust_remote_code
        )


def freeze(model: M) -> M:
    """Put the model in evaluation mode without gradients, and return it."""
    return model.eval().requires_grad_(False)


def assert_no_dropout(model: nn.Module) -> None:
    """Raise `AssertionError` if dropout is active; policy ratios would not start at 1."""
    active = [f"{path}.{name}" for path, _, name in _dropout_rates(model)]
    assert not active, f"dropout is active in {', '.join(active)}"


def quantization(quantize: Quantization | None, precision: Precision) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for 4-bit matrices; heads are not quantized."""
    if quantize is None:
        return {}
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quantize,
            bnb_4bit_compute_dtype=DTYPES[precision],
            # Applies to 4 bits as well; `embed_out` is GPT-NeoX's head.
            llm_int8_skip_modules=[HEAD, "lm_head", "embed_out"],
        )
    }


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Set every dropout rate to 0, and return the model."""
    for _, module, name in _dropout_rates(model):
        setattr(module, name, 0.0)
    return model


def _dropout_rates(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return path, module and attribute of every dropout rate above 0.

    A dropout module has it as `p`. Modules that call the function have it under a name that depends
    on the family: `dropout` and `layerdrop` in OPT, `hidden_dropout` in BLOOM, `attention_dropout`
    in Llama.
    """
    return [
        (path, module, name)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if ("drop" in name or name == "p") and isinstance(value, float) and value > 0
    ]
