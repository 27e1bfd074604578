"""The sizes of models, from config.json alone, and published ones by short name (`models.toml`)."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.base_model import BaseModelConfig, positions, reader
from rlhf_pipeline.config.training import LoRAConfig
from rlhf_pipeline.errors import ConfigError, suggestion

PLAIN = ("opt", "bloom", "gpt2", "gpt_neo", "gpt_neox", "gptj", "phi")
"""Families with two matrices in the feed-forward network. Others have a third, its gate."""
LEARNED_POSITIONS = ("opt", "gpt2", "gpt_neo")
QUERY_BIAS = ("qwen2",)
"""Families with biases in the projections of queries, keys and values only."""
HEAD_NORMS = ("qwen3",)
"""Families with norms of queries and keys."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder-only transformer."""

    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    positions: int
    """Positions with a learned embedding; 0 without such embeddings."""
    is_tied: bool
    """Whether the output layer shares the weights of the input embeddings."""
    embedding: int
    """Width of the embeddings; OPT-350M's are narrower than its layers."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shape":
        """Read a configuration, with the family's defaults; ConfigError if a size is missing, or
        for a mixture of experts."""
        name, value = str(config.get("model_type")), reader(config)
        hidden = value("hidden_size", "n_embd", "n_embed", "d_model")
        layers = value("num_hidden_layers", "n_layer")
        heads = value("num_attention_heads", "n_head")
        vocab = value("vocab_size")
        if not hidden or not layers or not heads or not vocab:
            raise ConfigError(
                f"base_model: found a configuration of model_type {name} without hidden_size, "
                "num_hidden_layers, num_attention_heads or vocab_size, expected all of them. Fix: "
                "use a model of a family that transformers knows"
            )
        if value("num_experts_per_tok", "num_local_experts", "num_experts"):
            raise ConfigError(
                f"base_model: found a mixture of experts ({name}), expected a model whose layers "
                "are all dense: the plan knows the sizes of no other"
            )
        tied = value("tie_word_embeddings")
        return cls(
            model_type=name,
            hidden=hidden,
            intermediate=value("intermediate_size", "ffn_dim", "n_inner") or 4 * hidden,
            layers=layers,
            heads=heads,
            kv_heads=value("num_key_value_heads") or heads,
            head_size=value("head_dim") or hidden // heads,
            vocab=vocab,
            positions=(positions(config) or 0) if name in LEARNED_POSITIONS else 0,
            is_tied=True if tied is None else bool(tied),
            embedding=value("word_embed_proj_dim") or hidden,
        )

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward network has a gate, and norms without biases."""
        return self.model_type not in PLAIN

    @property
    def queries(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def linear_layers(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of the linear layers in one transformer layer."""
        query, key = (self.hidden, self.queries), (self.hidden, self.keys)
        up, down = (self.hidden, self.intermediate), (self.intermediate, self.hidden)
        ups = (up, up) if self.is_gated else (up,)
        return (query, key, key, (self.queries, self.hidden), *ups, down)

    @property
    def matrices(self) -> int:
        """Weights of all linear layers, without embeddings and output layer."""
        projections = 2 * self.hidden * self.embedding if self.embedding != self.hidden else 0
        return self.layers * sum(a * b for a, b in self.linear_layers) + projections

    @property
    def embeddings(self) -> int:
        return self.vocab * self.embedding + self.positions * self.hidden

    @property
    def head(self) -> int:
        return 0 if self.is_tied else self.vocab * self.embedding

    @property
    def vectors(self) -> int:
        own_biases = sum(columns for _, columns in self.linear_layers)
        biases = 0 if self.is_gated else own_biases
        if self.model_type in QUERY_BIAS:
            biases = self.queries + 2 * self.keys
        if self.model_type in HEAD_NORMS:
            biases += 2 * self.head_size
        norm = self.hidden if self.is_gated else 2 * self.hidden
        norms = 1 if self.model_type in ("gptj", "phi") else 2
        return self.layers * (biases + norms * norm) + norm

    @property
    def parameters(self) -> int:
        return self.matrices + self.embeddings + self.head + self.vectors

    @property
    def body(self) -> int:
        """All weights without an output layer: a reward model or critic, whose head is a vector."""
        return self.matrices + self.embeddings + self.vectors

    def adapters(self, lora: LoRAConfig) -> int:
        """Weights of adapters beside all linear layers, or as many of the smallest as it names."""
        sizes, targets = sorted(map(sum, self.linear_layers)), lora.target_modules
        adapted = sizes if targets == "all-linear" else sizes[: len(targets)]
        return self.layers * lora.rank * sum(adapted)


@dataclass(frozen=True)
class PublishedModel:
    """A model on the hub."""

    path: str
    config: Mapping[str, Any]

    @property
    def shape(self) -> Shape:
        return Shape.of(self.config)


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
INSTRUCT: Mapping[str, str] = TABLE.pop("instruct")
"""The id on the hub of the chat model that was made from a base model, by its short name."""


def _published() -> Iterator[tuple[str, PublishedModel]]:
    for family, found in TABLE.items():
        for name, path, *values in found["models"]:
            sizes = dict(zip(found["columns"], values, strict=True))
            config = {"model_type": family, **found.get("shared", {}), **sizes}
            yield name, PublishedModel(path, config)


MODELS: Mapping[str, PublishedModel] = dict(_published())


def find_model(name: str) -> PublishedModel:
    """The model of a short name; raise ConfigError if there is none."""
    if name not in MODELS:
        raise ConfigError(
            f"model: found {name!r}{suggestion(name, MODELS)}, expected one of {', '.join(MODELS)}"
        )
    return MODELS[name]


def published(path: str) -> PublishedModel | None:
    """The model of an id on the hub, or the base model that it was made from; None if not known."""
    return next((m for name, m in MODELS.items() if path in (m.path, INSTRUCT.get(name))), None)


def base_model_shape(config: BaseModelConfig) -> Shape | None:
    """The sizes of the base model by its architecture, config.json or place in the table; None if
    nothing on this machine says them. Raises ConfigError as `Shape.of`."""
    known = config.configuration
    if known is None and (model := published(str(config.path))):
        known = model.config
    return None if known is None else Shape.of(known)
