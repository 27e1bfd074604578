"""The token contract: what models must share to read each other's tokens."""

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
    """Stored with every model. A stage that combines models requires equal contracts."""

    vocabulary_digest: str
    """SHA-256 of the tokenizer's vocabulary, merges and added tokens."""
    chat_template_digest: str
    """SHA-256 of the chat template."""
    pad_id: int
    eos_id: int
    bos_id: int | None
    vocab_size: int
    """Number of tokens. A model's embedding may be padded; padding rows are never sampled."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TokenContract:
        """The contract of a tokenizer.

        Raises:
            ArtifactError: EOS or padding token is missing, or both are the same token.
        """
        if tokenizer.eos_token_id is None:
            raise ArtifactError(
                f"tokenizer {tokenizer.name_or_path}: found no EOS token, so a response could "
                "never end. Fix: set its `eos_token`."
            )
        if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
            raise ArtifactError(
                f"tokenizer {tokenizer.name_or_path}: found padding token "
                f"{tokenizer.pad_token!r}, expected one that differs from EOS "
                f"{tokenizer.eos_token!r}. Fix: run stage base_model on the model; it adds a "
                "padding token."
            )
        # The current truncation and padding settings are not part of the contract.
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
    def read(cls, folder: Path) -> TokenContract:
        """Read the contract stored with a model."""
        path = folder / NAME
        if not path.is_file():
            raise ArtifactError(
                f"{folder}: {NAME} not found, so this pipeline did not make the model. Fix: run "
                "stage base_model on it first."
            )
        return cls(**json.loads(path.read_text()))

    def write(self, folder: Path) -> None:
        """Store the contract with a model."""
        (folder / NAME).write_text(json.dumps(asdict(self), indent=2))


def common_contract(models: dict[str, Path]) -> TokenContract:
    """The contract that all models share. Messages contain the names of the models.

    Raises:
        ArtifactError: two contracts differ, or one is missing.
    """
    (first, contract), *others = [(name, TokenContract.read(path)) for name, path in models.items()]
    for name, other in others:
        for field, value in asdict(contract).items():
            if (found := getattr(other, field)) != value:
                raise ArtifactError(
                    f"{first} and {name} use different tokenizers: {field} is {value} in "
                    f"{models[first]} and {found} in {models[name]}. Fix: train both from the same "
                    "base_model."
                )
    return contract


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
