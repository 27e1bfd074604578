"""The score of a response: a weighted sum over the sources of `ppo.rewards` or `grpo.rewards`.

    score = sum over sources of weight * (own score - own mean)          a function's mean is 0

PPO maximizes the same sum with the centred scores of reward models clipped. Shapes: B responses of
this rank.

To add a source, write a class like `CodeSource`, its block in `config/reward_blocks.py`, its kind
in `config/rewards.py`, and a case in `load_rewards`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.config import rewards as blocks
from rlhf_pipeline.data.template import fix_date, render_dialogues
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.data.tokenization import encode
from rlhf_pipeline.distributed.batches import by_micro_batches
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.generation.records import Answered, Scored
from rlhf_pipeline.models.forward import sequence_scores
from rlhf_pipeline.models.loading import assert_no_dropout, freeze, load_tokenizer
from rlhf_pipeline.models.scalar_head import TokenScores, load_scores
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.scoring.chat_model import ChatModel, RubricSource, reply_folder
from rlhf_pipeline.scoring.code_reward import CodeSource
from rlhf_pipeline.scoring.function_reward import FunctionSource, matches
from rlhf_pipeline.scoring.true_answers import agreement

Source = Callable[[Scored, Answered], Tensor]
"""One source of rewards, loaded: the centred scores of a rollout, (B,) float32 on the CPU."""


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

    @classmethod
    def load(
        cls,
        reward: blocks.ModelReward,
        folder: Path,
        place: str,
        contracts: Collection[TokenContract],
        micro_batch_tokens: int,
        world: World,
    ) -> "ModelSource":
        """Load the model, which scores policies with these contracts.

        Raises ArtifactError if its tokenizer is another one, and `retokenize` is off.
        """
        if not reward.retokenize and {TokenContract.read(folder)} != {*contracts}:
            raise ArtifactError(
                f"{place}: {reward.path} uses a different tokenizer from the policy. Fix: set its "
                "retokenize to true; it then reads text in its own chat template"
            )
        tokenizer = load_tokenizer(folder) if reward.retokenize else None
        if tokenizer is not None:
            fix_date(tokenizer, reward.template_date)
        how: Any = {"foreign": reward.retokenize, "device": world.device}
        model = freeze(load_scores(folder, reward.precision, **how))
        assert_no_dropout(model)
        stored = float(getattr(model.config, "score_mean", 0.0))
        mean = stored if reward.mean is None else reward.mean
        return cls(reward.path, model, mean, tokenizer, micro_batch_tokens, world)

    @torch.no_grad()
    def __call__(self, scored: Scored, answered: Answered) -> Tensor:
        """Centred scores at the last real token; StageError if a dialogue is too long."""
        sequences = scored.sequences
        if self.tokenizer is not None:
            rows = self._retokenized(self.tokenizer, answered)
            # The score belongs to the last token, so that token alone is the response.
            before, last = [ids[:-1] for ids in rows], [ids[-1:] for ids in rows]
            sequences = collate(before, last, self.tokenizer.pad_token_id or 0)
        how = self.micro_batch_tokens, self.world
        return by_micro_batches(sequence_scores, self.model, sequences, *how) - self.mean

    def _retokenized(
        self, tokenizer: PreTrainedTokenizerBase, answered: Answered
    ) -> list[list[int]]:
        turns = [[{"role": "assistant", "content": text}] for text in answered.responses]
        dialogues = [[*p, *turn] for p, turn in zip(answered.prompts, turns, strict=True)]
        places = [f"{self.path}, row {row}" for row in range(len(dialogues))]
        rows = encode(render_dialogues(tokenizer, places, dialogues), tokenizer)
        limit = getattr(self.model.config, "max_position_embeddings", None)
        longest = max(range(len(rows)), key=lambda row: len(rows[row]))
        if limit is not None and len(rows[longest]) > limit:
            raise StageError(
                f"{self.path}: found {len(rows[longest])} tokens to score, expected at most its "
                f"{limit} positions: the response to {answered.prompts[longest]}. "
                "Fix: lower split.max_prompt_tokens or sampling.max_response_tokens"
            )
        return rows


@dataclass(frozen=True)
class RewardSum:
    """All sources of rewards, loaded."""

    sources: dict[str, tuple[float, float, Source]]
    """Name to weight, clip range of the centred score, and source."""
    tokenizer: PreTrainedTokenizerBase | None  # the policy's; None: no source reads texts

    def __call__(self, scored: Scored, rows: Mapping[str, list[Any]]) -> Scored:
        """The rollout with the weighted sum, as it is and clipped.

        Raises ArtifactError if a source reads texts, and `rows`, the columns of the prompts' table,
        have no messages or references.
        """
        if not self.sources:  # a teacher alone
            return replace(scored, clipped_scores=scored.scores)
        answered = self._as_text(scored, rows)
        parts, replies = dict[str, Tensor](), dict[str, float]()
        for name, (*_, source) in self.sources.items():
            with heartbeat.scored_by(name):
                parts[name] = source(scored, answered)
            if isinstance(source, RubricSource | CodeSource):
                replies |= {f"{name}/{key}": n for key, n in source.counted().items()}
        named = [(weight, clip, parts[name]) for name, (weight, clip, _) in self.sources.items()]
        total = [weight * own for weight, _, own in named]
        clipped = [weight * own.clamp(-clip, clip) for weight, clip, own in named]
        scores, clipped_scores = (torch.stack(each).sum(0) for each in (total, clipped))
        parts = parts if len(parts) > 1 else {}
        return replace(
            scored, scores=scores, clipped_scores=clipped_scores, parts=parts, replies=replies
        )

    def _as_text(self, scored: Scored, rows: Mapping[str, list[Any]]) -> Answered:
        if self.tokenizer is None:
            return Answered([], [], [])
        if missing := " and ".join(sorted({"messages", "reference"} - rows.keys())):
            raise ArtifactError(f"the prompts have no column {missing}. Fix: run stage split again")
        ids = scored.sequences.response_ids
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return Answered.of(rows, [text.strip() for text in texts])


def load_rewards(
    job: LaunchedJob,
    rewards: blocks.Rewards,
    contract: TokenContract,
    world: World,
    tokenizer: PreTrainedTokenizerBase,
    trained_mean: float | None,
    *,
    score_clip: float | None,
    micro_batch_tokens: int,
) -> RewardSum:
    """Load the sources of rewards for the policy with this contract and tokenizer.

    `trained_mean` is the mean score of the trained reward model; None if it is not a source. Raises
    StageError if a function cannot be imported, or does not take prompts and responses, and
    ArtifactError if a folder contains no reward model, or one of another tokenizer.
    """

    def load(reward: blocks.RewardSource, name: str) -> Source:
        place = f"{job.stage}.{name}"
        match reward:
            case blocks.TrainedReward():
                assert trained_mean is not None, "the trained reward model is loaded as well"
                return lambda scored, _: scored.scores - trained_mean  # it has scored already
            case blocks.CallableReward():
                return FunctionSource.load(reward, job, name)
            case blocks.ReferenceReward():
                return FunctionSource(reward.reference, agreement(reward.reference))
            case blocks.RegexReward():
                return matches(reward.regex)
            case blocks.RubricReward():
                return RubricSource(reward, ChatModel(reward.openai, reply_folder(job), place))
            case blocks.CodeReward():
                return CodeSource(reward, place)
            case blocks.ModelReward():
                folder = job.inputs.get(name, reward.folder)
                model = ModelSource.load(
                    reward, folder, place, [contract], micro_batch_tokens, world
                )
                if name not in job.inputs:
                    job.expect_unchanged(name, folder)
                return model
            case _:
                raise TypeError(f"{type(reward).__name__} is not a source of rewards")

    sources, read_texts = dict[str, tuple[float, float, Source]](), False
    for index, reward in enumerate(rewards):
        source = load(reward, f"{blocks.INPUT_PREFIX}{index}")
        sources[reward.label] = (reward.weight, blocks.clip_of(reward, score_clip), source)
        is_text = not isinstance(reward, blocks.TrainedReward)
        read_texts |= reward.retokenize if isinstance(reward, blocks.ModelReward) else is_text
    return RewardSum(sources, tokenizer if read_texts else None)
