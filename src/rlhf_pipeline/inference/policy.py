"""A policy that answers: loaded once, any number of prompts at a time, token by token.

Shapes: B answers, T tokens of the longest prompt and its answer so far, V tokens of the vocabulary.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, Literal, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from rlhf_pipeline.config.base_model import positions_in
from rlhf_pipeline.data.records import Conversation
from rlhf_pipeline.data.template import render_dialogues, render_prompts
from rlhf_pipeline.data.token_contract import TokenContract, control_tokens
from rlhf_pipeline.errors import DataError, PipelineError
from rlhf_pipeline.models.lean_transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)
from rlhf_pipeline.models.loading import explain_loading_errors, loading_arguments
from rlhf_pipeline.models.sequences import pad
from rlhf_pipeline.rl.logprobs import position_ids

TRUST = "RLHF_TRUST_REMOTE_CODE"
"""Environment variable; "true" lets Python code that ships with a policy run."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""How a tokenizer decodes the first bytes of a character whose last bytes are still missing."""

Finish = Literal["stop", "length", "cancelled"]
"""Why an answer ended: an EOS or a stop text, its limit of tokens, or its reader."""


@contextmanager
def explained() -> Iterator[None]:
    """End the program with a message instead of a traceback."""
    try:
        yield
    except PipelineError as error:
        sys.exit(str(error))


@dataclass(frozen=True)
class Policy:
    """A model with its tokenizer, in the precision that it was saved in."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    contract: TokenContract
    positions: int | None
    """Tokens of a prompt with its answer, at most; None: unlimited."""

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """Load a policy, on the GPU if there is one.

        Raises ArtifactError if the folder has no safetensors, or needs its own Python code.
        """
        disable_progress_bar()  # it would appear in a conversation
        trust = os.environ.get(TRUST) == "true"
        device = torch.device("cuda") if torch.cuda.is_available() else None
        with explain_loading_errors(folder):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype="auto",
                **loading_arguments(folder, trust_remote_code=trust, device=device),
            )
        contract = TokenContract.of(tokenizer, model.generation_config.eos_token_id)
        return cls(model.eval(), tokenizer, contract, positions_in(Path(folder)))

    @cached_property
    def opening(self) -> str:
        """What the chat template writes between the generation prompt and an answer.

        The model writes it as well. Without it, an answer is a message like those in the data.
        """
        turns = [{"role": "user", "content": "?"}]
        (prompt,) = render_prompts(self.tokenizer, ["opening"], [turns])
        answered = [*turns, {"role": "assistant", "content": INCOMPLETE}]
        (dialogue,) = render_dialogues(self.tokenizer, ["opening"], [answered])
        return dialogue.removeprefix(prompt).partition(INCOMPLETE)[0]

    def chat_prompt(self, messages: Conversation) -> list[int]:
        """The token ids of a dialogue with the generation prompt, as in training.

        Raises DataError if a message contains a control token, which would end or forge a turn, and
        ArtifactError if the chat template rejects the dialogue.
        """
        said = "".join(message["content"] for message in messages)
        for token in control_tokens(self.tokenizer, self.contract):
            if token in said:
                raise DataError(f"found the control token {token}, expected text. Fix: remove it")
        (text,) = render_prompts(self.tokenizer, ["messages"], [messages])
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def room(self, prompt: Sequence[int], wanted: int) -> int:
        """Tokens that an answer to this prompt can have, at most `wanted`; 0 or less: none."""
        return wanted if self.positions is None else min(wanted, self.positions - len(prompt))


@dataclass(eq=False)
class Answer:
    """An answer while it is written."""

    policy: Policy
    prompt: list[int]
    max_tokens: int
    temperature: float = 1.0
    """0: always the most likely token."""
    top_p: float = 1.0
    """Sample from the fewest tokens that have this probability together."""
    random: Random = field(default_factory=Random)
    """One number of it decides each token: an equal seed gives an equal answer."""
    stop: Sequence[str] = ()
    """Texts that end the answer; it does not contain them."""
    opening: str = ""
    """What to remove from the beginning, see `Policy.opening`."""
    ids: list[int] = field(default_factory=list)
    """The tokens so far, with the EOS."""
    text: str = ""
    """What is certain of the text: no half character, and nothing that may become a stop text."""
    finish: Finish | None = None
    """None: not finished. Setting it ends the answer before its next token."""

    def add(self, token: int) -> str:
        """Append a token; return the text that is certain now."""
        self.ids.append(token)
        if token in self.policy.contract.eos_ids:
            self.finish = "stop"
        elif len(self.ids) >= self.max_tokens:
            self.finish = "length"
        text = str(self.policy.tokenizer.decode(self.ids, skip_special_tokens=True))
        text = "" if self.opening.startswith(text) else text.removeprefix(self.opening)
        ends = [text.index(stop) for stop in self.stop if stop in text]
        if ends:
            text, self.finish = text[: min(ends)], "stop"
        elif self.finish is None:
            text = text[: len(text) - self._uncertain(text)]
        before, self.text = self.text, text
        return text[len(before) :]

    def _uncertain(self, text: str) -> int:
        """Characters at the end of a text that later tokens may change or remove."""
        halves = len(text) - len(text.rstrip(INCOMPLETE))
        starts = [
            length for stop in self.stop for length in range(1, len(stop))
            if text.endswith(stop[:length])
        ]  # fmt: skip
        return max([halves, *starts])


@torch.inference_mode()
def write(answers: Sequence[Answer]) -> Iterator[tuple[Answer, str]]:
    """Write answers by the same policy together; yield each token's answer and its new text.

    An answer that has finished leaves the batch. Apart from rounding, an answer does not depend on
    the others.
    """
    policy, rows = answers[0].policy, list(answers)
    model, pad_id = policy.model, policy.contract.pad_id
    ids, mask = (x.to(model.device) for x in pad([a.prompt for a in rows], pad_id, left=True))
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": position_ids(mask)}
    cache = None
    while True:
        outputs = model(
            **inputs, attention_mask=mask.long(), past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        cache = outputs.past_key_values
        # Ids beyond the tokenizer's vocabulary stand for no token.
        tokens = next_tokens(outputs.logits[:, -1, : policy.contract.vocab_size], rows)
        for answer, token in zip(rows, tokens.tolist(), strict=True):
            if answer.finish is None:
                yield answer, answer.add(token)
        left = [number for number, answer in enumerate(rows) if answer.finish is None]
        if not left:
            return
        if len(left) < len(rows):
            rows = [rows[number] for number in left]
            kept = torch.tensor(left, device=model.device)
            cache.batch_select_indices(kept)
            mask, tokens = mask[kept], tokens[kept]
        mask = torch.nn.functional.pad(mask, (0, 1), value=True)
        inputs = {"input_ids": tokens[:, None], "position_ids": position_ids(mask)[:, -1:]}


def next_tokens(logits: Tensor, answers: Sequence[Answer]) -> Tensor:
    """The next token of each answer, (B,) long; `logits` are (B, V).

    A sampled token inverts the cumulative distribution at one uniform random number.
    """
    settings = [(answer.temperature, answer.top_p, answer.random.random()) for answer in answers]
    temperature, top_p, draws = torch.tensor(settings, dtype=torch.float64).to(logits.device).T
    greedy = logits.argmax(-1)
    if not temperature.any():
        return greedy
    sharpened = logits.double() / temperature.clamp(min=1e-4)[:, None]
    probabilities, order = sharpened.softmax(-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities
    cdf = (probabilities * (before < top_p[:, None])).cumsum(-1)
    place = torch.searchsorted(cdf, draws[:, None] * cdf[:, -1:], right=True)
    sampled = order.gather(1, place.clamp(max=logits.shape[1] - 1)).squeeze(1)
    return torch.where(temperature == 0, greedy, sampled)
