"""Load models the way all stages use them: explicit precision, no dropout, plain sampling."""

import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.modeling_layers import GenericForSequenceClassification as Classifier
from transformers.models.auto import modeling_auto as known
from transformers.utils import find_adapter_config_file

from rlhf_pipeline.config.block import Precision, Quantization
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import ArtifactError, PipelineError
from rlhf_pipeline.models import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from rlhf_pipeline.models.forward import install_logprob_head
from rlhf_pipeline.models.packing import use_packed_attention

M = TypeVar("M", bound=nn.Module)
HEAD = "score"  # attribute of a sequence classifier: the layer from hidden states to scalars
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions by name; fp16 is for exports alone."""
SAFE = (".safetensors", ".safetensors.index.json")


def load_policy(checkpoint: Path, precision: str | None, **how: Any) -> PreTrainedModel:
    """Load a causal language model: SFT model, actor or reference. `how`: see `load_scores`."""
    model: PreTrainedModel = load_model(AutoModelForCausalLM, checkpoint, precision, **how)
    model.generation_config = plain_generation(TokenContract.read(checkpoint))
    install_logprob_head(model)
    use_packed_attention(model)
    return without_dropout(model)


def load_finished(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a policy, ready for `generate`: on the GPU if there is one, in the
    precision that it was saved in.

    Raises ArtifactError if it needs its own Python code, unless RLHF_TRUST_REMOTE_CODE is "true".
    """
    trust = os.environ.get("RLHF_TRUST_REMOTE_CODE") == "true"
    device = torch.device("cuda") if torch.cuda.is_available() else None
    tokenizer = load_tokenizer(folder, trust_remote_code=trust)
    tokenizer.padding_side = "left"
    model: PreTrainedModel = load_model(
        AutoModelForCausalLM, folder, None, trust_remote_code=trust, device=device
    )
    contract = TokenContract.of(tokenizer, model.generation_config.eos_token_id)
    model.generation_config = plain_generation(contract)
    return model.eval(), tokenizer


def saved_precision(checkpoint: Path) -> Precision:
    """The precision in which a checkpoint computes as it was saved, by its config.json: bf16, else
    fp32, which contains all numbers of fp16."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    name = config.get("dtype") or config.get("torch_dtype")
    return "bf16" if name == "bfloat16" else "fp32"


def plain_generation(contract: TokenContract) -> GenerationConfig:
    """Generation that stops at every EOS and samples from the model's own distribution.

    A hub model's settings (top-k, repetition penalty) would change that distribution.
    """
    return GenerationConfig(eos_token_id=contract.eos_token_id, pad_token_id=contract.pad_id)


def load_tokenizer(
    checkpoint: Path | str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder or of a model on the hub."""
    with _explained(checkpoint):
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint, revision=revision, trust_remote_code=trust_remote_code
        )
        # It would be saved, and follows HF_HUB_OFFLINE: equal models would have other bytes.
        tokenizer.init_kwargs.pop("local_files_only", None)
        return tokenizer


def load_model(
    kind: Any,
    path: str | Path,
    precision: str | None,
    *,
    quantize: Quantization | None = None,
    revision: str | None = None,
    unpickle: bool = False,
    trust_remote_code: bool = False,
    device: torch.device | None = None,
    **further: Any,
) -> Any:
    """Return what `kind.from_pretrained` loads; nothing that a model ships is executed.

    Raises ArtifactError if the folder contains an adapter, its configuration selects weights in
    another format than safetensors, or transformers cannot load it.

    Args:
        path: a folder, or a model id on the hub.
        precision: None: as it was saved.
        quantize: storage of the weight matrices, but not of heads; None = `precision`.
        unpickle: without safetensors, read the tensors of `pytorch_model.bin`, and nothing else.
        trust_remote_code: execute Python code that ships with the model.
        device: where the weights go, each as it is read, so that main memory never holds a copy for
            each rank. None or the CPU: main memory.
    """
    source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    dtype = "auto" if precision is None else DTYPES[precision]
    if quantize is not None:
        from transformers import BitsAndBytesConfig

        further["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quantize,
            bnb_4bit_compute_dtype=dtype,
            # Applies to 4 bits as well; `embed_out` is GPT-NeoX's head.
            llm_int8_skip_modules=[HEAD, "lm_head", "embed_out"],
        )
    with _explained(path):
        if find_adapter_config_file(str(path), revision=revision) is not None:
            raise ArtifactError(
                f"{path}: found an adapter (adapter_config.json), expected a whole model; "
                "transformers would add the adapter to the model. Fix: merge it into its base "
                "model (peft's merge_and_unload) and save the result, or remove the adapter's files"
            )
        config = AutoConfig.from_pretrained(path, **source)
        if kind is AutoModelForSequenceClassification:
            register_classifier(type(config))
        weights = getattr(config, "transformers_weights", None)
        if weights is not None and not str(weights).endswith(SAFE):
            raise ArtifactError(
                f"{path}: found transformers_weights {weights!r} in config.json, expected a "
                "safetensors file. Fix: save the model again with save_pretrained"
            )
        model = kind.from_pretrained(
            path,
            dtype=dtype,
            use_safetensors=None if unpickle else True,
            device_map=None if device is None or device.type == "cpu" else {"": device},
            **source,
            **further,
        )
    # At ZeRO 3, transformers keeps renamings that it did not need, and saving would undo them.
    if renamings := getattr(model, "_weight_conversions", None):
        model._weight_conversions = [each for each in renamings if each.was_used()]
    return model


def register_classifier(config: type[Any]) -> None:
    """Make the sequence classifier of a family of which transformers has only other models."""
    model = known.MODEL_MAPPING.get(config, None)
    if model and config not in known.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        name = config.__name__.replace("Config", "ForSequenceClassification")
        made: Any = type(name, (Classifier, model.__base__), {"config_class": config})
        AutoModelForSequenceClassification.register(config, made, exist_ok=True)


@contextmanager
def _explained(path: str | Path) -> Iterator[None]:
    """Replace all errors of transformers and torch but "out of memory" by an ArtifactError."""
    try:
        yield
    except (PipelineError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # the errors of a damaged file have no common base class
        message = str(error)
        if isinstance(error, pickle.UnpicklingError):
            fault = (
                "found more than tensors in pytorch_model.bin, expected tensors only; reading the "
                "rest would execute it. Fix: get the model as safetensors from a trusted source"
            )
        elif "trust_remote_code" in message:
            fault = (
                "the model needs its own Python code (auto_map in its configuration), which is not "
                "executed. Fix: read that code; if you trust it, set base_model.trust_remote_code "
                "to true (it applies to the base model and to the models trained from it)"
            )
        elif "safetensors" in message:
            fault = (
                "found no weights as safetensors. Fix: for a base model with pytorch_model.bin, "
                "set base_model.unpickle_weights to true (reads tensors, executes nothing); "
                "otherwise save the model again with save_pretrained"
            )
        else:
            kind = type(error).__name__
            fault = (
                f"transformers cannot load it: {kind}: {message}. Fix: download or save it again"
            )
        raise ArtifactError(f"{path}: {fault}") from error


def freeze(model: M) -> M:
    """Put the model in evaluation mode without gradients, and return it."""
    return model.eval().requires_grad_(False)


def assert_no_dropout(model: nn.Module) -> None:
    """Raise `AssertionError` if dropout is active; policy ratios would not start at 1."""
    active = [f"{path}.{name}" for path, _, name in _dropout_rates(model)]
    assert not active, f"dropout is active in {', '.join(active)}"


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Set every dropout rate to 0, and return the model."""
    for _, module, name in _dropout_rates(model):
        setattr(module, name, 0.0)
    return model


def _dropout_rates(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Path, module and attribute of every dropout rate above 0.

    A dropout module has it as `p`, modules that call the function by a name of their family:
    `layerdrop` in OPT, `hidden_dropout` in BLOOM, `attention_dropout` in Llama.
    """
    return [
        (path, module, name)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if ("drop" in name or name == "p") and isinstance(value, float) and value > 0
    ]
