"""Write model and tokenizer of a `.gguf` file as a folder of transformers.

    python benchmarks/gguf_model.py FILE FOLDER

Quantized weights become float32, without the precision that they lost. It needs the package gguf.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(file: Path, folder: Path) -> None:
    """Read `file` with transformers, and save what it contains in `folder`."""
    source: Any = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    plain: Any = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(**source, **plain)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    for name in ("bos", "eos"):  # up to transformers 5.17, the tokenizer's EOS can be the BOS
        if (number := getattr(model.config, f"{name}_token_id", None)) is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(number))
    model.config.quantization_config = None  # saved weights are not quantized
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
