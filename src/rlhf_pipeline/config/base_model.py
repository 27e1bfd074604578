"""The base model: a checkpoint to start from, or the architecture of a small one to build."""

from __future__ import annotations

from typing import Any, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from rlhf_pipeline.config.architecture import find_family
from rlhf_pipeline.config.block import Block

COMMIT, BYTES = "commit", "bytes"
"""Names under which the identity of a fetched base model is an input of its stage."""


class BaseModelConfig(Block):
    """What every later stage starts from. Give `path`, or `architecture` with `vocab_size`."""

    model_config = ConfigDict(
        hide_input_in_errors=True
    )  # a path that is refused for its secret, a token that is no field

    path: str | None = None
    """A Hugging Face id (`facebook/opt-350m`) or a local folder with a causal language model and its tokenizer."""

    revision: str | None = None
    """Hub revision of `path`: branch, tag or commit. What counts, and is loaded, is the commit that it names when the stage is
    looked up; name one to be able to repeat a run."""

    trust_remote_code: bool = False
    """Execute Python code that lies in `path` (`auto_map` in its configuration), here and wherever a later stage loads what was
    made of it. Read the code and pin `revision` first: it runs with all your rights. False: such a model is refused, unless
    transformers knows its type without that code."""

    unpickle_weights: bool = False
    """Read `pytorch_model.bin` where `path` has no safetensors. torch reads tensors only (`weights_only`) and refuses anything
    that would be executed; what later stages read is safetensors. False: such a model is refused."""

    architecture: dict[str, Any] | None = None
    """Fields of a Hugging Face model configuration, `model_type` among them (`llama`, `opt`, ...): a model with random
    weights is built from it. It has never seen text, so it only serves worlds as small as the synthetic one. Null takes
    back a field that another environment gave for another family."""

    vocab_size: int | None = Field(default=None, ge=300)
    """Tokens of the byte-level BPE tokenizer trained on the sources' texts for a built model; 256 of them are bytes."""

    @property
    def positions(self) -> int | None:
        """Tokens that a built model has positions for; None if there is no such limit, or a checkpoint has to tell."""
        return (
            None
            if self.architecture is None
            else _value(self.architecture, "max_position_embeddings")
        )

    @field_validator("architecture")
    @classmethod
    def _known_fields(cls, architecture: dict[str, Any] | None) -> dict[str, Any] | None:
        """Under the family's own names."""
        if architecture is None:
            return None
        if not isinstance(model_type := architecture.get("model_type"), str):
            raise ValueError(
                "architecture has no model_type; name a Hugging Face one, such as llama or opt"
            )
        given = {name: value for name, value in architecture.items() if name != "model_type"}
        architecture = {"model_type": model_type, **find_family(model_type).given(given)}
        heads, shared = (
            _value(architecture, name) for name in ("num_attention_heads", "num_key_value_heads")
        )
        if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
            raise ValueError(
                f"num_key_value_heads {shared} does not divide num_attention_heads {heads}; set it to {heads}, or to a "
                "divisor for grouped queries"
            )
        return architecture

    @field_validator("path")
    @classmethod
    def _no_url(cls, path: str | None) -> str | None:
        if path is not None and "://" in path:
            raise ValueError(
                "path is a Hugging Face id or a folder, not a URL; give the hub's token as HF_TOKEN in the environment"
            )
        return path

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.path is not None and self.architecture is not None:
            raise ValueError("path and architecture are both set; set the other one to null")
        if self.path is None and (self.trust_remote_code or self.unpickle_weights):
            raise ValueError(
                "trust_remote_code and unpickle_weights are about path, which is null; set path, or both to false"
            )
        if self.path is None and (self.architecture is None or self.vocab_size is None):
            raise ValueError(
                "set path (a Hugging Face id or folder), or architecture and vocab_size to build a model"
            )
        return self


def _value(architecture: dict[str, Any], name: str) -> Any:
    return find_family(architecture["model_type"]).value(architecture, name)
