"""The score of a response: a weighted sum over the sources of `ppo.rewards` or `grpo.rewards`.

    score = sum over sources of weight * (own score - own mean)          a function's mean is 0

PPO maximizes the same sum with the centred scores of reward models clipped. Shapes: B responses of
this rank.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.config.rewards import INPUT_PREFIX, ModelReward, Scorer, clip_of
from rlhf_pipeline.data.template import fix_date, render_dialogues
from rlhf_pipeline.data.token_contract import (
    NAME,
    Reader,
    TokenContract,
    Tokenizer,
    any_of,
    control_tokens,
)
from rlhf_pipeline.data.tokenization import encode, tokenize, without
from rlhf_pipeline.distributed.batches import by_micro_batches
from rlhf_pipeline.distributed.world import World, on_gpu
from rlhf_pipeline.distributed.zero import DeepSpeedEngine
from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.generation.records import Rollout, Scored, response_texts
from rlhf_pipeline.models.forward import network_of, sequence_scores
from rlhf_pipeline.models.loading import assert_no_dropout, freeze, load_tokenizer
from rlhf_pipeline.models.scalar_head import TokenScores, load_scores
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.scoring.answers import Answered, Source, load_source


@dataclass(frozen=True)
class Reading:
    """What reward models read: responses of policies with these contracts, in micro-batches."""

    contracts: Collection[TokenContract]
    micro_batch_tokens: int
    world: World


@dataclass(frozen=True)
class ModelSource:
    """A reward model: of this pipeline, or in a folder of the user."""

    path: str
    model: TokenScores | DeepSpeedEngine
    mean: float
    tokenizer: PreTrainedTokenizerBase | None
    """The model's tokenizer if it reads text; None if it reads the policy's tokens."""
    contract: TokenContract | None
    """The contract of a tokenizer that this pipeline has prepared."""
    reading: Reading

    @classmethod
    def of_pipeline(
        cls, folder: Path, model: TokenScores | DeepSpeedEngine, job: LaunchedJob, reading: Reading
    ) -> "ModelSource":
        """A reward model that this pipeline has trained. With the tokenizer of the policies, it
        reads their tokens, else text as in its training."""
        contract, tokenizer = TokenContract.read(folder), None
        if {contract} != {*reading.contracts}:
            tokenizer = load_tokenizer(folder, trust_remote_code=job.trust_remote_code)
        return cls(str(folder), model, model.score_mean, tokenizer, contract, reading)

    @classmethod
    def load(
        cls, reward: ModelReward, place: str, name: str, job: LaunchedJob, reading: Reading
    ) -> "ModelSource":
        """Load the model; see `load_source`.

        Raises ArtifactError if its tokenizer is not the policies', and `retokenize` is off.
        """
        folder = job.inputs.get(name, reward.folder)
        if reward.on_hub:
            folder = Path(snapshot_download(reward.path, revision=job.digests[name]))
        if not reward.retokenize and {TokenContract.read(folder)} != {*reading.contracts}:
            raise ArtifactError(
                f"{place}: {reward.path} uses a different tokenizer from the policy. Fix: set its "
                "retokenize to true; it then reads text in its own chat template"
            )
        tokenizer = load_tokenizer(folder) if reward.retokenize else None
        if tokenizer is not None:
            fix_date(tokenizer, reward.template_date)
        how: Any = {"foreign": reward.retokenize, "device": reading.world.device}
        model = freeze(load_scores(folder, reward.precision, **how))
        assert_no_dropout(model)
        if not reward.on_hub and name not in job.inputs:
            job.expect_unchanged(name, folder)
        stored = float(getattr(model.config, "score_mean", 0.0))
        mean = stored if reward.mean is None else reward.mean
        contract = TokenContract.read(folder) if (folder / NAME).is_file() else None
        return cls(reward.path, model, mean, tokenizer, contract, reading)

    @torch.no_grad()
    def __call__(self, scored: Scored, answered: Answered) -> list[float]:
        """Centred scores at the last real token; StageError if a dialogue is too long."""
        sequences = scored.sequences
        if self.tokenizer is not None:
            rows = self.retokenized(self.tokenizer, answered)
            # The score belongs to the last token, so that token alone is the response.
            before, last = [ids[:-1] for ids in rows], [ids[-1:] for ids in rows]
            sequences = collate(before, last, self.tokenizer.pad_token_id or 0)
        how = self.reading.micro_batch_tokens, self.reading.world
        raw = by_micro_batches(sequence_scores, self.model, sequences, *how)
        scores: list[float] = (raw - self.mean).tolist()
        return scores

    def retokenized(self, tokenizer: Tokenizer, answered: Answered) -> list[list[int]]:
        """The dialogues in the model's template and tokens, up to the one with the score.

        What the policy wrote cannot end or forge a turn: the texts of control tokens are removed.
        """
        control = any_of(control_tokens(tokenizer, self.contract))
        said = [without(control, text) for text in answered.responses]
        limit = getattr(network_of(self.model).config, "max_position_embeddings", None)
        places = [f"{self.path}, row {row}" for row in range(len(said))]
        if self.contract is not None:  # as the split has tokenized comparisons
            asked = zip(places, answered.prompts, said, strict=True)
            examples = [{"id": i, "prompt": p, "chosen": s, "rejected": None} for i, p, s in asked]
            both = tokenize(examples, Reader(tokenizer, self.contract))
            # Without the oldest tokens, as the split cuts prompts.
            rows = [[*one.prompt, *(one.chosen or ())][-(limit or 0) :] for one in both]
        else:
            turns = [[{"role": "assistant", "content": text}] for text in said]
            dialogues = [[*p, *turn] for p, turn in zip(answered.prompts, turns, strict=True)]
            rows = encode(render_dialogues(tokenizer, places, dialogues), tokenizer)
        longest = max(range(len(rows)), key=lambda row: len(rows[row]))
        if limit is not None and len(rows[longest]) > limit:
            raise StageError(
                f"{self.path}: found {len(rows[longest])} tokens to score, expected at most its "
                f"{limit} positions: the response to {answered.prompts[longest]}. "
                "Fix: lower split.max_prompt_tokens or sampling.max_response_tokens"
            )
        return rows


@dataclass(frozen=True)
class WeightedSource:
    """A source of rewards, loaded."""

    weight: float
    clip: float  # the range of the centred score; infinite if it has none
    score: Source


class Begun(NamedTuple):
    """A scoring on its way."""

    answered: Answered
    apart: Mapping[str, Future[list[float]]]
    """The scores that other processes compute, by source."""


@dataclass(frozen=True)
class RewardSum:
    """All sources of rewards by name, loaded."""

    sources: dict[str, WeightedSource]
    tokenizer: PreTrainedTokenizerBase | None  # the policy's; None: no source reads texts
    trained_reads_tokens: bool  # of the policy: it scores with the other models, before the sum

    @property
    def models(self) -> dict[str, nn.Module]:
        """The reward models among them."""
        sources = {f"rewards.{name}": source.score for name, source in self.sources.items()}
        return {name: one.model for name, one in sources.items() if isinstance(one, ModelSource)}

    def begin(self, answers: Rollout | Scored, rows: Mapping[str, list[Any]]) -> "Begun":
        """Start the sources that wait for others, beside which models can score: those that ask
        servers, and with models on a GPU those with processes, whose time limits run.

        Raises ArtifactError if a source reads texts, and `rows`, the columns of the prompts' table,
        have no messages or references.
        """
        answered, apart = self._as_text(answers, rows), dict[str, Future[list[float]]]()
        elsewhere = ("server", "processes") if on_gpu() else ("server",)
        pool = ThreadPoolExecutor(max(1, len(self.sources)))
        for name, source in self.sources.items():
            if getattr(source.score, "apart", None) in elsewhere:
                texts_alone = cast(Any, None)
                apart[name] = pool.submit(source.score, texts_alone, answered)
        pool.shutdown(wait=False)
        return Begun(answered, apart)

    def __call__(
        self, scored: Scored, rows: Mapping[str, list[Any]], begun: "Begun | None" = None
    ) -> Scored:
        """The rollout with the weighted sum, as it is and clipped. None: nothing has begun."""
        if not self.sources:  # a teacher alone
            return replace(scored, clipped_scores=scored.scores)
        answered, apart = begun or self.begin(scored, rows)
        parts, replies = dict[str, Tensor](), dict[str, float]()
        for name, source in self.sources.items():
            with heartbeat.scored_by(name):
                found = apart[name].result() if name in apart else source.score(scored, answered)
                parts[name] = torch.tensor(found)
            if (counted := getattr(source.score, "counted", None)) is not None:
                replies |= {f"{name}/{key}": n for key, n in counted().items()}
        total = torch.stack([s.weight * parts[name] for name, s in self.sources.items()]).sum(0)
        clipped = [
            source.weight * parts[name].clamp(-source.clip, source.clip)
            for name, source in self.sources.items()
        ]
        return replace(
            scored,
            scores=total,
            clipped_scores=torch.stack(clipped).sum(0),
            parts=parts if len(parts) > 1 else {},
            replies=replies,
        )

    def _as_text(self, answers: Rollout | Scored, rows: Mapping[str, list[Any]]) -> Answered:
        if self.tokenizer is None:
            return Answered([], [], [])
        if missing := " and ".join(sorted({"messages", "reference"} - rows.keys())):
            raise ArtifactError(f"the prompts have no column {missing}. Fix: run stage split again")
        return Answered.of(rows, response_texts(answers, self.tokenizer), answers.episodes)


def load_rewards(
    job: LaunchedJob,
    rewards: Sequence[Scorer],
    score_clip: float | None,
    reading: Reading,
    tokenizer: PreTrainedTokenizerBase,
    trained: TokenScores | DeepSpeedEngine | None,
) -> RewardSum:
    """Load the sources of rewards for the policy with this tokenizer.

    `trained` is the trained reward model; None if it is not a source. With the policy's tokens, it
    has scored already. Raises what `load_source` raises.
    """
    sources, reads_texts, reads_tokens = dict[str, WeightedSource](), False, False
    for index, reward in enumerate(rewards):
        name = f"{INPUT_PREFIX}{index}"
        source = load_source(reward, f"{job.stage}.{name}", name, job, reading)
        if source is None:
            assert trained is not None, "the trained reward model is loaded as well"
            source = ModelSource.of_pipeline(job.inputs["reward_model"], trained, job, reading)
            if reads_tokens := source.tokenizer is None:
                source = partial(_by_trained, mean=source.mean)
        clip = clip_of(reward, score_clip)
        sources[reward.label] = WeightedSource(reward.weight, clip, source)
        is_of_tokens = isinstance(source, partial) or getattr(source, "tokenizer", "") is None
        reads_texts |= not is_of_tokens
    return RewardSum(sources, tokenizer if reads_texts else None, reads_tokens)


def _by_trained(scored: Scored, _: Answered, mean: float) -> list[float]:
    scores: list[float] = (scored.scores - mean).tolist()
    return scores
