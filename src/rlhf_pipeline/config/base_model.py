from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, field_validator

from rlhf_pipeline.config.architecture import find_family, positions, positions_in
from rlhf_pipeline.config.block import Block

TEMPLATE_DATE = date(2024, 7, 26)
"""The default of `template_date`. Llama 3.1's template has this date where no clock is at hand."""

COMMIT, BYTES = "commit", "bytes"
"""Names of the digest that identifies a base model: a commit on the hub, or local bytes."""


class BaseModelConfig(Block):
    """The model that all stages start from. Set `path`, or `architecture` with `vocab_size`."""

    # A refused path or an unknown field may contain a secret.
    model_config = ConfigDict(hide_input_in_errors=True)

    path: str | None = None
    """Causal language model with its tokenizer: a Hugging Face id (`facebook/opt-350m`), a local
    folder, or a local `.gguf` file. None: build a model from `architecture`."""
    revision: str | None = None
    """Hub revision of `path`: branch, tag or commit. Each run resolves it to a commit, which is
    part of the recipe. Set a commit to make a run repeatable. None: the newest commit of the
    default branch."""
    trust_remote_code: bool = False
    """Execute the Python code in `path` (`auto_map` in its configuration), here and in every later
    stage that loads the model. The code runs with all your rights: read it and pin `revision`
    first. False: refuse such a model, unless transformers knows its type without that code."""
    unpickle_weights: bool = False
    """Read `pytorch_model.bin` if `path` has no safetensors. torch reads only tensors
    (`weights_only`) and executes nothing; later stages read safetensors. False: refuse such a
    model."""
    template_date: date = TEMPLATE_DATE
    """The date (year-month-day) that a chat template renders in place of today's, such as Llama
    3.1's "Today Date". Exported tokenizers contain it."""
    architecture: dict[str, Any] | None = None
    """Fields of a Hugging Face model configuration, including `model_type` (`llama`, `opt`, ...),
    to build a model with random weights. Such a model has seen no text, so it suits only small data
    sets like the synthetic one. Null unsets a field that another environment sets."""
    vocab_size: int | None = Field(default=None, ge=300)
    """Vocabulary size of the byte-level BPE tokenizer that is trained for a built model on the
    sources' texts. 256 tokens are bytes."""

    @property
    def positions(self) -> int | None:
        """Maximum number of tokens of a built model or of one in a local folder; None if unlimited,
        or not known yet."""
        if self.architecture is not None:
            return positions(self.architecture)
        return None if self.path is None else positions_in(Path(self.path))

    @property
    def is_gguf(self) -> bool:
        return self.path is not None and self.path.endswith(".gguf")

    @field_validator("architecture")
    @classmethod
    def _known_fields(cls, architecture: dict[str, Any] | None) -> dict[str, Any] | None:
        """Translate all fields to the family's own names."""
        if architecture is None:
            return None
        if not isinstance(model_type := architecture.get("model_type"), str):
            raise ValueError(
                f"found model_type {model_type!r}, expected a name. "
                "Fix: set it to a model type of Hugging Face, such as llama or opt"
            )
        fields = {name: value for name, value in architecture.items() if name != "model_type"}
        family = find_family(model_type)
        architecture = {"model_type": model_type, **family.resolve(fields)}
        heads = family.value(architecture, "num_attention_heads")
        shared = family.value(architecture, "num_key_value_heads")
        if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
            raise ValueError(
                f"num_key_value_heads: found {shared}, expected a divisor of num_attention_heads "
                f"{heads}. Fix: set it to {heads}, or to a smaller divisor for grouped queries"
            )
        return architecture

    @field_validator("path")
    @classmethod
    def _no_url(cls, path: str | None) -> str | None:
        """Refuse a URL; expand `~`."""
        if path is not None and "://" in path:
            raise ValueError(
                "found a URL, expected a Hugging Face id, a folder or a .gguf file. "
                "Fix: use an id, and set the hub's token as HF_TOKEN in the environment"
            )
        return str(Path(path).expanduser()) if path is not None and path.startswith("~") else path

    def _faults(self) -> Iterator[str]:
        if self.path is not None and self.architecture is not None:
            yield "found both path and architecture, expected one. Fix: set the other one to null"
        if self.path is None and (self.trust_remote_code or self.unpickle_weights):
            yield (
                "found trust_remote_code or unpickle_weights without path, expected path. "
                "Fix: set path, or set both to false"
            )
        if self.is_gguf and (self.trust_remote_code or self.unpickle_weights):
            yield (
                "found trust_remote_code or unpickle_weights with a .gguf file, which contains "
                "neither code nor pickles. Fix: set both to false"
            )
        if self.path is None and (self.architecture is None or self.vocab_size is None):
            yield (
                "found neither path nor architecture with vocab_size, expected one of them. "
                "Fix: set path to a Hugging Face id, folder or .gguf file, or set both others to "
                "build a model"
            )
