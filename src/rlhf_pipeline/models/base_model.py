"""Stage program: load or build the base model and its tokenizer, and export both."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DynamicCache, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_pipeline.config.base_model import BYTES, COMMIT, BaseModelConfig
from rlhf_pipeline.data.template import HUMAN_ASSISTANT_TEMPLATE, fix_date
from rlhf_pipeline.data.token_contract import TokenContract, end_tokens
from rlhf_pipeline.data.tokenization import corpus
from rlhf_pipeline.errors import ArtifactError, ConfigError
from rlhf_pipeline.models import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from rlhf_pipeline.models.forward import FIRST, SECOND, outputs
from rlhf_pipeline.models.kernels import FUSED_ROUNDINGS, SUMMED
from rlhf_pipeline.models.loading import load_model, load_tokenizer, plain_generation
from rlhf_pipeline.models.packing import attends_only
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.runtime.imports import hidden
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.program import run_program

PAD_TOKEN, EOS_TOKEN = "<|pad|>", "<|end|>"
EMBEDDING_MULTIPLE = 64
"""New embeddings have a multiple of this many rows, for which GPUs have fast kernels."""


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
    if not attends_only(model):
        try_states(model.eval())
    with hidden("deepspeed"):  # saving looks for its engines; importing it takes over a second
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


@torch.no_grad()
def try_states(model: PreTrainedModel) -> None:
    """Read two rows, one of them padded, up to their last token, and then that token, as sampling
    does. Raise ArtifactError if a row alone has other logits: its state contains the padding."""
    rows, eps = (FIRST, SECOND), torch.finfo(model.dtype).eps
    inputs = collate([row[:-1] for row in rows], [row[-1:] for row in rows], 0).model_inputs()
    mask, bound = inputs.pop("attention_mask"), FUSED_ROUNDINGS * eps + SUMMED * 2**-23
    try:
        cache = DynamicCache(config=model.config)
        for end, part in ((-1, slice(-1)), (None, slice(-1, None))):
            now: Any = {name: each[:, part] for name, each in inputs.items()} | {"use_cache": True}
            found = model(**now, attention_mask=mask[:, :end], past_key_values=cache).logits[:, -1]
        alone = [outputs(model, model, input_ids=torch.tensor([row]))[-1] for row in rows]
        apart = float((found - torch.stack(alone)).norm() / torch.stack(alone).norm())
        if not apart <= bound:
            raise ArithmeticError(f"logits that differ by {apart:.2g} from those of the row alone")
    except Exception as error:  # also one in the code of a family
        raise ArtifactError(
            f"base_model: a padded row of a {model.config.model_type}: found "
            f"{type(error).__name__}: {error}, expected at most {bound:.2g}. Fix: use another model"
        ) from error


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


if __name__ == "__main__":
    run_program(main)
