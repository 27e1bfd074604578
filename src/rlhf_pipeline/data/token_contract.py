"""The token contract: what two models must agree on before one may read what the other wrote."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_pipeline.errors import ArtifactError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME = "token_contract.json"


@dataclass(frozen=True)
class TokenContract:
    """Travels with every checkpoint; every stage that combines models asserts that theirs are equal."""

    vocabulary_digest: str
    """SHA-256 of the tokenizer's vocabulary, merges and added tokens."""
    chat_template_digest: str
    """SHA-256 of the chat template."""
    pad_id: int
    eos_id: int
    bos_id: int | None
    vocab_size: int
    """Tokens that exist; a model's embedding may be padded beyond them, and those rows are never sampled."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TokenContract:
        """The contract of a tokenizer; raise `ArtifactError` if padding cannot be told from the end of a response."""
        if tokenizer.eos_token_id is None:
            raise ArtifactError(
                f"the tokenizer {tokenizer.name_or_path} has no EOS token: a response could never end"
            )
        if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
            raise ArtifactError(
                f"the tokenizer {tokenizer.name_or_path} pads with {tokenizer.pad_token!r}, which must be set and differ "
                f"from EOS {tokenizer.eos_token!r}; stage base_model gives it a token of its own"
            )
        # The truncation and padding settings of the moment are stored in the same file; they are not part of the contract.
        state = json.loads(tokenizer.backend_tokenizer.to_str()) | {
            "truncation": None,
            "padding": None,
        }
        return cls(
            vocabulary_digest=_digest(json.dumps(state, sort_keys=True)),
            chat_template_digest=_digest(str(tokenizer.chat_template)),
            pad_id=tokenizer.pad_token_id,
            eos_id=tokenizer.eos_token_id,
            bos_id=tokenizer.bos_token_id,
            vocab_size=len(tokenizer),
        )

    @classmethod
    def read(cls, checkpoint: Path) -> TokenContract:
        """The contract stored with a checkpoint."""
        path = checkpoint / NAME
        if not path.is_file():
            raise ArtifactError(
                f"{checkpoint} has no {NAME}: it was not made by this pipeline; run base_model on it first"
            )
        return cls(**json.loads(path.read_text()))

    def write(self, checkpoint: Path) -> None:
        """Store the contract with a checkpoint."""
        (checkpoint / NAME).write_text(json.dumps(asdict(self), indent=2))


def common_contract(checkpoints: dict[str, Path]) -> TokenContract:
    """The contract that all checkpoints share; raise `ArtifactError` that names the first two that differ, and in what."""
    (first, contract), *others = [
        (name, TokenContract.read(path)) for name, path in checkpoints.items()
    ]
    for name, other in others:
        differing = [
            field for field, value in asdict(contract).items() if asdict(other)[field] != value
        ]
        if differing:
            field = differing[0]
            raise ArtifactError(
                f"{first} and {name} do not speak the same tokens: {field} is {asdict(contract)[field]} in "
                f"{checkpoints[first]} and {asdict(other)[field]} in {checkpoints[name]}; "
                f"train both from the same base_model"
            )
    return contract


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
