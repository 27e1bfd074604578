"""Serve an exported policy with MLflow: the model folder is an MLflow model that answers prompts.

    mlflow models serve --env-manager local -m models:/rlhf-policy@champion -p 5000
    curl localhost:5000/invocations -H 'Content-Type: application/json' \\
         -d '{"dataframe_records": [{"prompt": "hello"}], "params": {"max_new_tokens": 32}}'
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.data.template import render_dialogues, render_prompts
from rlhf_pipeline.data.token_contract import TokenContract, control_tokens
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.models.lean_transformers import AutoModelForCausalLM, PreTrainedModel
from rlhf_pipeline.models.loading import (
    MAX_NEW_TOKENS,
    load_model,
    load_tokenizer,
    plain_generation,
)
from rlhf_pipeline.runtime.manifest import artifact_of, verify

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class ServedPolicy:
    """A policy that answers single-turn prompts, in the precision that it was saved in."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    contract: TokenContract

    def predict(
        self, model_input: pandas.DataFrame, params: dict[str, Any] | None = None
    ) -> list[str]:
        """Answer each prompt.

        Raises DataError if a prompt contains a control token, which would end or forge a turn.

        Args:
            model_input: column "prompt", one user message per row, without a chat template.
            params: "max_new_tokens" (default 128), "temperature" (default 0: always the most likely
                token) and "seed" (default 0; no effect at temperature 0). Equal requests have equal
                answers.
        """
        params = params or {}
        prompts = [str(prompt) for prompt in model_input["prompt"]]
        for token in control_tokens(self.tokenizer, self.contract):
            if any(token in prompt for prompt in prompts):
                raise DataError(f"found the control token {token}, expected text. Fix: remove it")
        turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = render_prompts(self.tokenizer, [f"prompt {n}" for n in range(len(turns))], turns)
        inputs = self.tokenizer(
            texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
        ).to(self.model.device)
        temperature = float(params.get("temperature", 0.0))
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
        # Ids beyond the tokenizer's vocabulary stand for no token.
        rows = range(self.contract.vocab_size, self.model.get_input_embeddings().num_embeddings)
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(int(params.get("seed", 0)))
            found = self.model.generate(
                **inputs,
                max_new_tokens=int(params.get("max_new_tokens", MAX_NEW_TOKENS)),
                suppress_tokens=list(rows) or None,
                **sampling if temperature > 0 else {"do_sample": False},
            )
        answers: list[str] = self.tokenizer.batch_decode(
            found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        start = opening(self.tokenizer)
        return [answer.removeprefix(start) for answer in answers]


def opening(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the chat template writes between the generation prompt and an answer.

    The model writes it as well. Without it, an answer is a message like those in the data.
    """
    turns = [{"role": "user", "content": "?"}]
    (prompt,) = render_prompts(tokenizer, ["opening"], [turns])
    answered = [*turns, {"role": "assistant", "content": "\N{REPLACEMENT CHARACTER}"}]
    (dialogue,) = render_dialogues(tokenizer, ["opening"], [answered])
    return dialogue.removeprefix(prompt).partition("\N{REPLACEMENT CHARACTER}")[0]


def load(folder: Path | str) -> ServedPolicy:
    """Load a policy, on the GPU if there is one.

    Raises ArtifactError if the folder has no safetensors, or needs its own Python code and the
    environment variable RLHF_TRUST_REMOTE_CODE is not "true".
    """
    trust = os.environ.get("RLHF_TRUST_REMOTE_CODE") == "true"
    device = torch.device("cuda") if torch.cuda.is_available() else None
    tokenizer = load_tokenizer(folder, trust_remote_code=trust)
    how: Any = {"trust_remote_code": trust, "device": device}
    model = load_model(AutoModelForCausalLM, folder, precision=None, **how)
    contract = TokenContract.of(tokenizer, model.generation_config.eos_token_id)
    model.generation_config = plain_generation(contract)
    return ServedPolicy(model.eval(), tokenizer, contract)


def _load_pyfunc(folder: str) -> ServedPolicy:
    """Load a policy for MLflow. Raises ArtifactError also if a file of the artifact was changed."""
    if (artifact := artifact_of(Path(folder))) is not None:  # others have verified it before
        verify(artifact)
    return load(folder)
