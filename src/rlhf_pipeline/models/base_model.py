"""Stage program: load or build the base model and its tokenizer, and export both."""

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GgufConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_pipeline.config.base_model import BYTES, COMMIT, BaseModelConfig
from rlhf_pipeline.data.template import HUMAN_ASSISTANT_TEMPLATE, fix_date
from rlhf_pipeline.data.token_contract import TokenContract, end_tokens
from rlhf_pipeline.data.tokenization import corpus
from rlhf_pipeline.errors import ArtifactError, ConfigError
from rlhf_pipeline.models.lean_transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from rlhf_pipeline.models.loading import load_model, load_tokenizer, plain_generation
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.program import run_program

PAD_TOKEN, EOS_TOKEN = "<|pad|>", "<|end|>"
EMBEDDING_MULTIPLE = 64
"""New embeddings have a multiple of this many rows, for which GPUs have fast kernels."""
STRING, ARRAY, UINT64 = 8, 9, 10
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, UINT64: 8, 11: 8, 12: 8}
"""Bytes of the values of fixed size in a `.gguf` file, by type."""
MAX_VALUES = 2**22
"""Values in its header, of each of which readers make objects. Large vocabularies have 1.5e6."""


def main(job: LaunchedJob) -> dict[str, float]:
    """Load or build the model and its tokenizer, and write both with their token contract."""
    config = job.block("base_model", BaseModelConfig)
    torch.manual_seed(job.seed)
    trust, metrics = config.trust_remote_code, dict[str, float]()
    if config.path is None:
        trained = train_tokenizer(config, list(job.inputs.values()))
        tokenizer = as_loaded(trained, config, job.export)
        model = build_model(config, tokenizer)
    else:
        if config.is_gguf:
            model, tokenizer = load_gguf(Path(config.path))
            metrics["base_model/bits_per_weight"] = bits_per_weight(Path(config.path))
        else:
            # The commit that the driver resolved; the branch may have moved since.
            how: Any = {"revision": job.digests.get(COMMIT), "trust_remote_code": trust}
            model = load_model(
                AutoModelForCausalLM, config.path, None, unpickle=config.unpickle_weights, **how
            )
            tokenizer = load_tokenizer(config.path, **how)
        check_size(tokenizer, rows := model.get_input_embeddings().num_embeddings)
        metrics["base_model/new_tokens"] = float(max(0, len(tokenizer) - rows))
        metrics["base_model/has_chat_template"] = float(tokenizer.chat_template is not None)
    if BYTES in job.digests:
        job.expect_unchanged(BYTES, Path(str(config.path)))
    contract = prepared(tokenizer, config, model.generation_config.eos_token_id)
    if config.path is not None and len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=EMBEDDING_MULTIPLE)
    model.config.pad_token_id, model.config.eos_token_id = contract.pad_id, contract.eos_token_id
    model.generation_config = plain_generation(contract)
    model.save_pretrained(job.export)
    tokenizer.save_pretrained(job.export)
    loaded = load_tokenizer(job.export, trust_remote_code=trust)
    if TokenContract.of(loaded, contract.eos_ids) != contract:
        raise ArtifactError(
            f"{config.path or 'base_model.architecture'}: the tokenizer changes when it is saved "
            "and loaded, because transformers rebuilds it for model type "
            f"{model.config.model_type}. Fix: use a tokenizer of that type"
        )
    contract.write(job.export)
    return metrics | {
        "base_model/parameters": model.num_parameters(),
        "base_model/vocab_size": len(tokenizer),
    }


def train_tokenizer(config: BaseModelConfig, sources: Sequence[Path]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of `config.vocab_size` tokens on the sources' texts."""
    assert config.vocab_size is not None, "validated: required without a path"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[PAD_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(sources), trainer)
    special = {"pad_token": PAD_TOKEN, "eos_token": EOS_TOKEN}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def as_loaded(
    tokenizer: PreTrainedTokenizerBase, config: BaseModelConfig, folder: Path
) -> PreTrainedTokenizerBase:
    """Save the tokenizer to `folder`, and return it as `AutoTokenizer` loads it for this family.

    Most families load what was saved. For Qwen2, `AutoTokenizer` substitutes Qwen2's normalizer,
    pre-tokenizer and `<|endoftext|>`.
    """
    assert config.architecture is not None, "validated: required without a path"
    tokenizer.save_pretrained(folder)
    family = AutoConfig.for_model(config.architecture["model_type"])
    return AutoTokenizer.from_pretrained(folder, config=family)


def build_model(config: BaseModelConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Build a model with random weights for the tokenizer's vocabulary and special tokens."""
    fields = (config.architecture or {}) | {
        "vocab_size": math.ceil(len(tokenizer) / EMBEDDING_MULTIPLE) * EMBEDDING_MULTIPLE,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    try:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ConfigError(f"base_model.architecture: cannot build the model: {error}") from error


def check_size(tokenizer: PreTrainedTokenizerBase, embeddings: int) -> None:
    """Raise ArtifactError if a model has no embedding for an entry of its tokenizer's vocabulary.

    Tokens that were added to the vocabulary may lack one: the model is enlarged for them.
    """
    if tokenizer.vocab_size > embeddings:
        raise ArtifactError(
            f"tokenizer {tokenizer.name_or_path}: found a vocabulary of {tokenizer.vocab_size} "
            f"tokens, expected at most the model's {embeddings} embeddings. It seems to belong to "
            "another model. Fix: save the model's own tokenizer in its folder; if the vocabulary "
            "was extended, call resize_token_embeddings of the model, and save it again"
        )


def prepared(
    tokenizer: PreTrainedTokenizerBase,
    config: BaseModelConfig,
    model_eos: int | Sequence[int] | None,
) -> TokenContract:
    """Give a tokenizer a padding token that is no EOS, a chat template and a fixed date, and return
    its contract; raises like `TokenContract.of`."""
    if tokenizer.pad_token_id in (None, *end_tokens(tokenizer, model_eos)):
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
    if tokenizer.chat_template is None:
        tokenizer.chat_template = HUMAN_ASSISTANT_TEMPLATE
    fix_date(tokenizer, config.template_date)
    return TokenContract.of(tokenizer, model_eos)


def found_tokenizer(config: BaseModelConfig) -> tuple[PreTrainedTokenizerBase, TokenContract]:
    """The tokenizer in a local folder as stage base_model exports it, and its contract; raises the
    errors of the stage without reading weights."""
    trust: Any = {"trust_remote_code": config.trust_remote_code}
    tokenizer = load_tokenizer(str(config.path), **trust)
    model = AutoConfig.from_pretrained(config.path, **trust)
    check_size(tokenizer, model.get_text_config().vocab_size)
    try:
        eos = GenerationConfig.from_pretrained(config.path).eos_token_id
    except OSError:  # without a file of its own, it is the model's configuration
        eos = getattr(model, "eos_token_id", None)
    return tokenizer, prepared(tokenizer, config, eos)


def without_weights(config: BaseModelConfig) -> PreTrainedModel:
    """The model of a local folder or of `architecture`, whose tensors have shapes alone."""
    trust: Any = {"trust_remote_code": config.trust_remote_code}
    architecture = (
        AutoConfig.for_model(**config.architecture or {})
        if config.path is None
        else AutoConfig.from_pretrained(config.path, **trust)
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(architecture, **trust)


def load_gguf(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer of a `.gguf` file; quantized weights become float32.

    Raises ArtifactError if the file is damaged, or transformers cannot convert its architecture.
    """
    plain: Any = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    source: Any = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        check_header(file)
        model = AutoModelForCausalLM.from_pretrained(**source, **plain)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # the errors of a damaged file have no common base class
        raise ArtifactError(
            f"base_model.path: {file}: transformers cannot read the file: {error}. Fix: download "
            "it again; if its architecture is not supported, use the model's safetensors folder"
        ) from error
    for name in ("bos", "eos"):  # up to transformers 5.17, the tokenizer's EOS can be the BOS
        if (number := getattr(model.config, f"{name}_token_id", None)) is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(number))
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


if __name__ == "__main__":
    run_program(main)
