from pathlib import Path

import torch
from transformers import GgufConfig, PreTrainedTokenizerBase

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.lean_transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)


def load_gguf(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer of a `.gguf` file; quantized weights become float32.

    The weights are those of the file: the precision that quantization lost is not restored. Raises
    ArtifactError if the file is damaged, or transformers cannot convert its architecture.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # the errors of a damaged file have no common base class
        raise ArtifactError(
            f"base_model.path: {file}: transformers cannot read the file: {error}. Fix: download "
            "it again; if its architecture is not supported, use the model's safetensors folder"
        ) from error
    model.config.quantization_config = None  # exported weights are not quantized
    return model, tokenizer


def bits_per_weight(file: Path) -> float:
    """The mean number of bits that a weight occupies in a `.gguf` file, with its scales."""
    from gguf import GGUFReader

    tensors = GGUFReader(file).tensors
    return 8 * sum(t.n_bytes for t in tensors) / sum(int(t.n_elements) for t in tensors)
