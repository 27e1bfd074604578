"""Serve an exported policy with MLflow: the model folder is an MLflow model that answers prompts.

    mlflow models serve --env-manager local -m models:/rlhf-policy@champion -p 5000
    curl localhost:5000/invocations -H 'Content-Type: application/json' \\
         -d '{"dataframe_records": [{"prompt": "hello"}], "params": {"max_new_tokens": 32}}'
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.models.mlflow_format import MAX_NEW_TOKENS

if TYPE_CHECKING:
    import pandas
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TRUST = "RLHF_TRUST_REMOTE_CODE"
"""Environment variable; "true" lets Python code that ships with a served policy run."""


@dataclass(frozen=True)
class ServedPolicy:
    """A policy that answers single-turn prompts."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def predict(
        self, model_input: pandas.DataFrame, params: dict[str, Any] | None = None
    ) -> list[str]:
        """Answer each prompt.

        Args:
            model_input: column "prompt", one user message per row, without a chat template.
            params: "max_new_tokens" (default 128), "temperature" (default 0: always the most likely
                token) and "seed" (default 0; no effect at temperature 0). At higher temperatures,
                an answer depends on the other prompts of its request.
        """
        import torch

        params = params or {}
        temperature = float(params.get("temperature", 0.0))
        # Explicit, because the generation config of the model may contain other values.
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        # Left-padded ids and attention mask, (B, P) each.
        inputs = self.tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt in model_input["prompt"]],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        ).to(self.model.device)
        # Ids beyond the tokenizer's vocabulary stand for no token.
        padded_rows = list(range(len(self.tokenizer), self.model.config.vocab_size))
        with torch.inference_mode(), torch.random.fork_rng():
            torch.manual_seed(int(params.get("seed", 0)))
            outputs = self.model.generate(
                **inputs,
                max_new_tokens=int(params.get("max_new_tokens", MAX_NEW_TOKENS)),
                pad_token_id=self.tokenizer.pad_token_id,
                suppress_tokens=padded_rows or None,
                **(sampling if temperature > 0 else {"do_sample": False}),
            )
        responses = outputs[:, inputs["input_ids"].shape[1] :]
        return self.tokenizer.batch_decode(responses, skip_special_tokens=True)


def load(path: str) -> ServedPolicy:
    """Load a policy in its saved precision, on the GPU if there is one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlhf_pipeline.models.safe_loading import explain_loading_errors, loading_arguments

    trust = os.environ.get(TRUST) == "true"
    with explain_loading_errors(path):
        tokenizer = AutoTokenizer.from_pretrained(
            path, padding_side="left", trust_remote_code=trust
        )
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", **loading_arguments(path, trust_remote_code=trust)
        )
    return ServedPolicy(model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer)


_load_pyfunc = load  # the name that MLflow calls
