"""The token contract: what models must share to read each other's tokens."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias

from rlhf_pipeline.errors import ArtifactError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
"""A tokenizer of transformers, whose import takes seconds: programs show their start before it."""

NAME = "token_contract.json"


@dataclass(frozen=True)
class TokenContract:
    """Stored with every model. A stage that combines models requires equal contracts."""

    vocabulary_digest: str
    """SHA-256 of the tokenizer's vocabulary, merges and added tokens."""
    chat_template_digest: str
    pad_id: int
    eos_ids: tuple[int, ...]
    """The tokens that end a response, see `end_tokens`."""
    bos_id: int | None
    vocab_size: int
    """Number of tokens, without those that pad a model's embedding."""

    @property
    def eos_id(self) -> int:
        return self.eos_ids[0]

    @property
    def eos_token_id(self) -> int | list[int]:
        """The value of `eos_token_id` in configurations of transformers: one id, or a list."""
        return self.eos_id if len(self.eos_ids) == 1 else list(self.eos_ids)

    @classmethod
    def of(cls, tokenizer: Tokenizer, model_eos: int | Sequence[int] | None = None) -> Self:
        """The contract of a tokenizer and of a model with these EOS ids, see `end_tokens`. Raises
        ArtifactError if EOS or padding is missing, one token is both, or an EOS is unfit."""
        eos_ids = end_tokens(tokenizer, model_eos)
        if tokenizer.pad_token_id is None or tokenizer.pad_token_id in eos_ids:
            ends = tokenizer.convert_ids_to_tokens(list(eos_ids))
            raise ArtifactError(
                f"tokenizer {tokenizer.name_or_path}: found padding token "
                f"{tokenizer.pad_token!r}, expected one that differs from EOS "
                f"{', '.join(map(repr, ends))}. Fix: run stage base_model on the model; it adds a "
                "padding token."
            )
        # The current truncation and padding settings are not part of the contract.
        unset = {"truncation": None, "padding": None}
        state = json.loads(tokenizer.backend_tokenizer.to_str()) | unset
        vocabulary, template = (
            hashlib.sha256(text.encode()).hexdigest()
            for text in (json.dumps(state, sort_keys=True), str(tokenizer.chat_template))
        )
        return cls(
            vocabulary_digest=vocabulary,
            chat_template_digest=template,
            pad_id=tokenizer.pad_token_id,
            eos_ids=eos_ids,
            bos_id=tokenizer.bos_token_id,
            vocab_size=len(tokenizer),
        )

    @classmethod
    def read(cls, folder: Path) -> Self:
        path = folder / NAME
        if not path.is_file():
            raise ArtifactError(
                f"{folder}: {NAME} not found, so this pipeline did not make the model. Fix: run "
                "stage base_model on it first."
            )
        fields = json.loads(path.read_text())
        return cls(**fields | {"eos_ids": tuple(fields["eos_ids"])})

    def write(self, folder: Path) -> None:
        (folder / NAME).write_text(json.dumps(asdict(self), indent=2))


class Reader(NamedTuple):
    """A tokenizer with its contract."""

    tokenizer: Tokenizer
    contract: TokenContract


def end_tokens(tokenizer: Tokenizer, model_eos: int | Sequence[int] | None) -> tuple[int, ...]:
    """The tokens that end a response: the tokenizer's EOS, then those of `model_eos`, ascending.

    `model_eos` is `eos_token_id` of the model's generation config. Llama 3 ends a turn with
    `<|eot_id|>`, a document with `<|end_of_text|>`, and a message to a tool with `<|eom_id|>`.
    Raises ArtifactError if the tokenizer has no EOS, or one of the model's is not a control token.
    """
    if tokenizer.eos_token_id is None:
        raise ArtifactError(
            f"tokenizer {tokenizer.name_or_path}: found no EOS token, so a response could never "
            "end. Fix: set its `eos_token`."
        )
    ids = {model_eos} if isinstance(model_eos, int) else set(model_eos or ())
    for number in sorted(ids):
        token = tokenizer.added_tokens_decoder.get(number)
        if token is None or not token.special:
            raise ArtifactError(
                f"tokenizer {tokenizer.name_or_path}: found eos_token_id {number} in the model's "
                f"generation config, which is {tokenizer.convert_ids_to_tokens(number)!r}, "
                "expected a control token. Fix: save the model with the right eos_token_id in "
                "generation_config.json, and set base_model.path to its folder."
            )
    return (tokenizer.eos_token_id, *sorted(ids - {tokenizer.eos_token_id}))


def control_tokens(tokenizer: Tokenizer, contract: TokenContract | None) -> frozenset[str]:
    """The texts that the tokenizer reads as control tokens, without that for unknown words."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    ends = tokenizer.convert_ids_to_tokens(list(contract.eos_ids)) if contract else ()
    roles = {tokenizer.bos_token, tokenizer.pad_token, *ends}
    return frozenset(special - ({tokenizer.unk_token} - roles))


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern for some texts, the longest first: one may be the beginning of another. That for
    none matches nothing."""
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def common_contract(
    models: dict[str, Path], fix: str = "train both from the same base_model"
) -> TokenContract:
    """The contract that all models, by name, share; raises ArtifactError if two differ."""
    contracts = {name: TokenContract.read(path) for name, path in models.items()}
    return same_contract(contracts, models, fix)


def same_contract(
    contracts: Mapping[str, TokenContract], models: Mapping[str, Path | str], fix: str
) -> TokenContract:
    """The contract that all models share, by name and folder; ArtifactError if two differ."""
    first, contract = next(iter(contracts.items()))
    for name, other in contracts.items():
        for field, value in asdict(contract).items():
            if (found := getattr(other, field)) != value:
                raise ArtifactError(
                    f"{first} and {name} use different tokenizers: {field} is {value} in "
                    f"{models[first]} and {found} in {models[name]}. Fix: {fix}."
                )
    return contract
