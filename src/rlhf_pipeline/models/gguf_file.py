import struct
from pathlib import Path

import torch
from transformers import GgufConfig, PreTrainedTokenizerBase

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.lean_transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

STRING, ARRAY, UINT64 = 8, 9, 10
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, UINT64: 8, 11: 8, 12: 8}
"""Bytes of the values of fixed size, by type."""
MAX_VALUES = 2**22
"""Values in a header, of each of which the readers make objects. Large vocabularies have 1.5e6."""


def load_gguf(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer of a `.gguf` file; quantized weights become float32.

    The weights are those of the file: the precision that quantization lost is not restored. Raises
    ArtifactError if the file is damaged, or transformers cannot convert its architecture.
    """
    try:
        check_header(file)
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


def check_header(file: Path) -> None:
    """Raise ValueError if the header announces more than the file contains.

    The readers of gguf and transformers allocate and loop as it says. Format:
    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    left, size, order = MAX_VALUES, file.stat().st_size, "<"
    with file.open("rb") as stream:

        def take(count: int) -> bytes:
            if count > size - stream.tell():
                raise ValueError(f"byte {stream.tell()} of {size} announces {count} more bytes")
            return stream.read(count)

        def number(code: str) -> int:
            return int(struct.unpack(order + code, take(struct.calcsize(code)))[0])

        def values(kind: int, count: int = 1) -> None:
            nonlocal left
            left -= count
            if left < 0:
                raise ValueError(f"the header announces more than {MAX_VALUES} values")
            for _ in range(count):
                if kind == ARRAY:
                    values(number("I"), number("Q"))
                else:
                    take(number("Q") if kind == STRING else SIZES[kind])

        take(4)
        order = "<" if number("I") & 0xFFFF else ">"  # as gguf's reader decides
        tensors, fields = number("Q"), number("Q")
        for _ in range(fields):
            values(STRING)
            values(number("I"))
        for _ in range(tensors):
            values(STRING)
            values(UINT64, number("I"))
            take(4 + 8)  # type and offset


def bits_per_weight(file: Path) -> float:
    """The mean number of bits that a weight occupies in a `.gguf` file, with its scales."""
    from gguf import GGUFReader

    tensors = GGUFReader(file).tensors
    return 8 * sum(t.n_bytes for t in tensors) / sum(int(t.n_elements) for t in tensors)
