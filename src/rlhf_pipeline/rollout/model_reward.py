from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.config.rewards import ModelReward
from rlhf_pipeline.data.template import fix_date, render_dialogues
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.data.tokenization import encode
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.models.forward import sequence_scores
from rlhf_pipeline.models.loading import assert_no_dropout, freeze, load_tokenizer
from rlhf_pipeline.models.scalar_head import TokenScores, load_scores
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.rollout.function_reward import Answered
from rlhf_pipeline.rollout.scoring import Scored, by_micro_batches


@dataclass(frozen=True)
class ModelSource:
    """A reward model in a folder of the user."""

    path: str
    model: TokenScores
    mean: float
    tokenizer: PreTrainedTokenizerBase | None
    """The model's tokenizer if it reads text; None if it reads the policy's tokens."""
    micro_batch_tokens: int
    world: World

    @property
    def reads_texts(self) -> bool:
        return self.tokenizer is not None

    @classmethod
    def load(
        cls,
        reward: ModelReward,
        folder: Path,
        place: str,
        contract: TokenContract,
        micro_batch_tokens: int,
        world: World,
    ) -> "ModelSource":
        """Load the model.

        Raises ArtifactError if the model uses a different tokenizer from the policy, and
        `retokenize` is off.
        """
        if not reward.retokenize and TokenContract.read(folder) != contract:
            raise ArtifactError(
                f"{place}: {reward.path} uses a different tokenizer from the policy. Fix: set its "
                "retokenize to true; it then reads text in its own chat template"
            )
        tokenizer = load_tokenizer(folder) if reward.retokenize else None
        if tokenizer is not None:
            fix_date(tokenizer, reward.template_date)
        model = freeze(
            load_scores(folder, reward.precision, foreign=reward.retokenize, device=world.device)
        )
        assert_no_dropout(model)
        mean = reward.mean
        if mean is None:
            mean = float(getattr(model.config, "score_mean", 0.0))
        return cls(reward.path, model, mean, tokenizer, micro_batch_tokens, world)

    @torch.no_grad()
    def __call__(self, scored: Scored, answered: Answered) -> Tensor:
        """Centred scores at the last real token.

        Raises StageError if a dialogue has more tokens than the model has positions.
        """
        sequences = scored.sequences
        if self.tokenizer is not None:
            rows = self._retokenized(self.tokenizer, answered)
            # The score belongs to the last token, so that token alone is the response.
            sequences = collate(
                [ids[:-1] for ids in rows],
                [ids[-1:] for ids in rows],
                self.tokenizer.pad_token_id or 0,
            )
        scores = by_micro_batches(
            sequence_scores, self.model, sequences, self.micro_batch_tokens, self.world
        )
        return scores - self.mean

    def _retokenized(
        self, tokenizer: PreTrainedTokenizerBase, answered: Answered
    ) -> list[list[int]]:
        dialogues = [
            [*prompt, {"role": "assistant", "content": response}]
            for prompt, response in zip(answered.prompts, answered.responses, strict=True)
        ]
        places = [f"{self.path}, row {row}" for row in range(len(dialogues))]
        rows = encode(render_dialogues(tokenizer, places, dialogues), tokenizer)
        limit = getattr(self.model.config, "max_position_embeddings", None)
        longest = max(range(len(rows)), key=lambda row: len(rows[row]))
        if limit is not None and len(rows[longest]) > limit:
            raise StageError(
                f"{self.path}: found {len(rows[longest])} tokens to score, expected at most its "
                f"{limit} positions: the response to {answered.prompts[longest]}. "
                "Fix: lower split.max_prompt_tokens or ppo.sampling.max_response_tokens"
            )
        return rows
