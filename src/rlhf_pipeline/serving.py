"""A policy as an MLflow model, which answers prompts: docs/serving.md."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import pipeline

from rlhf_pipeline.data.token_contract import TokenContract, control_tokens
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.models import AutoModelForCausalLM, loading
from rlhf_pipeline.runtime.manifest import artifact_of, verify


class ServedPolicy:
    """A policy in the precision that it was saved in, on the GPU if there is one.

    Raises ArtifactError if it needs its own Python code, unless RLHF_TRUST_REMOTE_CODE is "true".
    """

    def __init__(self, folder: Path | str) -> None:
        how: Any = {"trust_remote_code": os.environ.get("RLHF_TRUST_REMOTE_CODE") == "true"}
        self.tokenizer = loading.load_tokenizer(folder, **how)
        self.tokenizer.padding_side = "left"
        how["device"] = torch.device("cuda") if torch.cuda.is_available() else None
        self.model = loading.load_model(AutoModelForCausalLM, folder, precision=None, **how).eval()
        self.contract = TokenContract.of(self.tokenizer, self.model.generation_config.eos_token_id)
        self.model.generation_config = loading.plain_generation(self.contract)

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> list[str]:
        """Answer the prompts in column "prompt" of a data frame, each one message of a user.

        `params` has "max_new_tokens", "temperature" (0: always the most likely token) and "seed".
        Equal requests have equal answers. Raises DataError if a prompt contains a control token,
        which would end or forge a turn.
        """
        given = {"max_new_tokens": loading.MAX_NEW_TOKENS, "temperature": 0, "seed": 0}
        given |= params or {}
        how: dict[str, Any] = {"max_new_tokens": int(given["max_new_tokens"]), "do_sample": False}
        if (heat := float(given["temperature"])) > 0:
            how |= {"do_sample": True, "temperature": heat, "top_k": 0}
        prompts = [str(prompt) for prompt in model_input["prompt"]]
        for token in control_tokens(self.tokenizer, self.contract):
            if any(token in prompt for prompt in prompts):
                raise DataError(f"found the control token {token}, expected text. Fix: remove it")
        # Ids beyond the tokenizer's vocabulary stand for no token.
        ids = range(self.contract.vocab_size, self.model.get_input_embeddings().num_embeddings)
        answer = pipeline("text-generation", model=self.model, tokenizer=self.tokenizer)
        turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
        with torch.random.fork_rng():
            torch.manual_seed(int(given["seed"]))
            found = answer(turns, return_full_text=False, suppress_tokens=[*ids] or None, **how)
        return [answers[0]["generated_text"] for answers in found]


def _load_pyfunc(folder: str) -> ServedPolicy:
    """Load a policy for MLflow. Raises ArtifactError also if a file of the artifact was changed."""
    if (artifact := artifact_of(Path(folder))) is not None:  # others have verified it before
        verify(artifact)
    return ServedPolicy(folder)
