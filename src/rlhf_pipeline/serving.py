"""Serve an exported policy with MLflow: the model folder is an MLflow model that answers prompts.

    mlflow models serve --env-manager local -m models:/rlhf-policy@champion -p 5000
    curl localhost:5000/invocations -H 'Content-Type: application/json' \\
         -d '{"dataframe_records": [{"prompt": "hello"}], "params": {"max_new_tokens": 32}}'
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.inference.policy import Answer, Policy, write
from rlhf_pipeline.models.mlflow_format import MAX_NEW_TOKENS

if TYPE_CHECKING:
    import pandas


class ServedPolicy(Policy):
    """A policy that answers single-turn prompts."""

    def predict(
        self, model_input: pandas.DataFrame, params: dict[str, Any] | None = None
    ) -> list[str]:
        """Answer each prompt.

        Args:
            model_input: column "prompt", one user message per row, without a chat template.
            params: "max_new_tokens" (default 128), "temperature" (default 0: always the most likely
                token) and "seed" (default 0; no effect at temperature 0). Equal prompts have equal
                answers.
        """
        params = params or {}
        answers = [
            Answer(
                self,
                self.chat_prompt([{"role": "user", "content": prompt}]),
                max_tokens=int(params.get("max_new_tokens", MAX_NEW_TOKENS)),
                temperature=float(params.get("temperature", 0.0)),
                random=Random(int(params.get("seed", 0))),
                opening=self.opening,
            )
            for prompt in model_input["prompt"]
        ]
        for _ in write(answers):
            pass
        return [answer.text for answer in answers]


load = _load_pyfunc = ServedPolicy.load  # the second name is the one that MLflow calls
