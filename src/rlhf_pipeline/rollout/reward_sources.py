"""The score of a response as a weighted sum over the sources of `ppo.rewards`.

    score = sum over sources of weight * (own score - own mean)          a function's mean is 0

A function of the user's is called once a rollout on each rank, with that rank's rows:

    def reward(prompts: list[list[dict[str, str]]], responses: list[str]) -> list[float]

`prompts` are messages ({"role": ..., "content": ...}), `responses` texts without special tokens and without white space
around them. A function that has a parameter `references` gets the true answers by it, None where a row has none.

Shapes: B responses of this rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import (
    INPUT_PREFIX,
    CallableReward,
    ModelReward,
    RewardSource,
    TrainedReward,
)
from rlhf_pipeline.data.records import Conversation
from rlhf_pipeline.data.template import render_dialogues
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.data.tokenization import encode
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.models.forward import sequence_scores
from rlhf_pipeline.models.loading import assert_no_dropout, freeze, load_scores, load_tokenizer
from rlhf_pipeline.models.scalar_head import TokenScores
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.rollout.scoring import Scored, by_micro_batches
from rlhf_pipeline.runtime.job import LaunchedJob


@dataclass(frozen=True)
class Asked:
    """A rollout in words; B rows each."""

    prompts: list[Conversation]
    references: list[str | None]
    responses: list[str]


Source = Callable[[Scored, Asked], Tensor]
"""Centred scores of a rollout, (B,) float32 on the CPU."""


@dataclass(frozen=True)
class RewardSum:
    """All sources, loaded."""

    sources: dict[str, tuple[float, Source]]
    """Name to weight and scores."""
    tokenizer: PreTrainedTokenizerBase
    """The policy's."""

    def __call__(self, scored: Scored, rows: Mapping[str, list[Any]]) -> Scored:
        """The rollout with its total as the score; `rows` are the columns of the prompts' table.

        Raises:
            ArtifactError: the table was prepared before there were rewards to read messages and references.
        """
        if missing := {"messages", "reference"} - rows.keys():
            raise ArtifactError(
                f"the prompts have no column {' and '.join(sorted(missing))}; run stage split again"
            )
        texts = self.tokenizer.batch_decode(scored.rollout.response_ids, skip_special_tokens=True)
        asked = Asked(rows["messages"], rows["reference"], [text.strip() for text in texts])
        parts = {name: source(scored, asked) for name, (_, source) in self.sources.items()}
        total = torch.stack(
            [weight * parts[name] for name, (weight, _) in self.sources.items()]
        ).sum(0)
        return replace(scored, scores=total, parts=parts if len(parts) > 1 else {})


def load_rewards(
    job: LaunchedJob,
    config: PPOConfig,
    contract: TokenContract,
    world: World,
    trained_mean: float | None,
) -> RewardSum | None:
    """The sources of `ppo.rewards`; None where the trained reward model alone is the score, as it is.

    Args:
        job: holds the functions' files.
        config: names the sources.
        contract: the policy's tokens.
        world: where models are put.
        trained_mean: what the trained reward model's scores are centred by; None where it is no source.

    Raises:
        StageError: a function cannot be imported, or does not take prompts and responses.
        ArtifactError: a reward model is none, or its tokens are not the policy's.
    """
    if config.rewards == type(config).model_fields["rewards"].default:
        return None
    sources: dict[str, tuple[float, Source]] = {}
    for index, reward in enumerate(config.rewards):
        sources[reward.label] = (
            reward.weight,
            _load(reward, f"{INPUT_PREFIX}{index}", job, config, contract, world, trained_mean),
        )
    return RewardSum(
        sources, load_tokenizer(job.inputs["sft_model"], trust_remote_code=job.trust_remote_code)
    )


def _load(
    reward: RewardSource,
    name: str,
    job: LaunchedJob,
    config: PPOConfig,
    contract: TokenContract,
    world: World,
    trained_mean: float | None,
) -> Source:
    match reward:
        case TrainedReward():
            assert trained_mean is not None, "it is loaded where it is a source"
            return lambda scored, _: scored.scores - trained_mean
        case CallableReward():
            return FunctionSource(reward.callable, _import(reward, job.inputs[name]))
        case ModelReward():
            folder = job.inputs.get(name, reward.folder)
            return ModelSource.load(
                reward, folder, f"ppo.{name}", contract, config.micro_batch_size_per_gpu, world
            )
        case _:
            raise TypeError(f"{type(reward).__name__} is no source of rewards")


# --- functions ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FunctionSource:
    """A function of the user's."""

    place: str
    """What the user calls it."""
    function: Callable[..., Any]

    def __post_init__(self) -> None:
        try:
            inspect.signature(self.function).bind([], [], **self._references([]))
        except TypeError as error:
            raise StageError(
                f"{self.place} cannot be called with (prompts, responses): {error}; define it as "
                "`def reward(prompts, responses)`, with `references` as a third parameter for the true answers"
            ) from None

    def __call__(self, _: Scored, asked: Asked) -> Tensor:
        """The function's numbers.

        Raises:
            StageError: it raises, returns another number of results than there are responses, or anything but finite numbers.
        """
        try:
            results = self._call(asked.prompts, asked.responses, asked.references)
        except Exception as error:
            raise StageError(
                f"{self.place} failed {self._where(asked)}: {type(error).__name__}: {error}"
            ) from error
        if len(results) != len(asked.responses):
            raise StageError(
                f"{self.place} returned {len(results)} results for {len(asked.responses)} responses, the first to the prompt "
                f"{asked.prompts[0]}; return one number for each"
            )
        return torch.tensor(
            [self._number(result, asked, row) for row, result in enumerate(results)]
        )

    def _call(
        self, prompts: list[Conversation], responses: list[str], references: list[str | None]
    ) -> list[Any]:
        return list(self.function(prompts, responses, **self._references(references)))

    def _references(self, references: list[str | None]) -> dict[str, list[str | None]]:
        """The references as an argument, where the function takes them."""
        return (
            {"references": references}
            if "references" in inspect.signature(self.function).parameters
            else {}
        )

    def _number(self, result: Any, asked: Asked, row: int) -> float:
        try:
            number = math.nan if isinstance(result, str | bytes) else float(result)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise StageError(
                f"{self.place} returned {result!r} for the response {asked.responses[row]!r} to the prompt "
                f"{asked.prompts[row]}; return a finite number"
            )
        return number

    def _where(self, asked: Asked) -> str:
        """The first row that fails by itself, after many failed together."""
        for prompt, response, reference in zip(
            asked.prompts, asked.responses, asked.references, strict=True
        ):
            try:
                self._call([prompt], [response], [reference])
            except Exception:
                return f"at the response {response!r} to the prompt {prompt}"
        return f"at {len(asked.prompts)} responses together, the first to the prompt {asked.prompts[0]}"


def _import(reward: CallableReward, path: Path) -> Callable[..., Any]:
    """The function; its file is run as a module of its own, a module is imported by its name."""
    try:
        module = (
            _run_file(path)
            if reward.place.endswith(".py")
            else importlib.import_module(reward.place)
        )
        function = getattr(module, reward.function)
    except Exception as error:
        raise StageError(
            f"{reward.callable} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise StageError(f"{reward.callable} is {function!r}, not a function")
    return function


def _run_file(path: Path) -> ModuleType:
    name = f"ppo_rewards_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "preflight refuses files that are no .py"
    module = sys.modules[name] = importlib.util.module_from_spec(
        spec
    )  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# --- models ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSource:
    """A reward model from elsewhere."""

    path: str
    model: TokenScores
    mean: float
    tokenizer: PreTrainedTokenizerBase | None
    """Its own, where it reads texts; None: it reads the policy's tokens."""
    micro_batch_size: int

    @classmethod
    def load(
        cls,
        reward: ModelReward,
        folder: Path,
        place: str,
        contract: TokenContract,
        micro_batch_size: int,
        world: World,
    ) -> ModelSource:
        """Refuse another token contract than the policy's, unless texts are what it reads; then load."""
        if not reward.retokenize and TokenContract.read(folder) != contract:
            raise ArtifactError(
                f"{place}: {reward.path} does not speak the policy's tokens; set its retokenize to true to give it texts in "
                "its own chat template"
            )
        tokenizer = load_tokenizer(folder) if reward.retokenize else None
        model = freeze(load_scores(folder, reward.precision, foreign=reward.retokenize)).to(
            world.device
        )
        assert_no_dropout(model)
        mean = (
            float(getattr(model.config, "score_mean", 0.0)) if reward.mean is None else reward.mean
        )
        return cls(reward.path, model, mean, tokenizer, micro_batch_size)

    @torch.no_grad()
    def __call__(self, scored: Scored, asked: Asked) -> Tensor:
        """Its centred scores at the last real token."""
        rollout = scored.rollout
        if self.tokenizer is not None:
            rows = self._retokenized(self.tokenizer, asked)
            # The last token by itself is the response: the one place where a score is read.
            rollout = collate(
                [ids[:-1] for ids in rows],
                [ids[-1:] for ids in rows],
                self.tokenizer.pad_token_id or 0,
            )
        device = next(self.model.parameters()).device
        return (
            by_micro_batches(
                lambda batch: sequence_scores(self.model, batch),
                rollout,
                self.micro_batch_size,
                device,
            )
            - self.mean
        )

    def _retokenized(self, tokenizer: PreTrainedTokenizerBase, asked: Asked) -> list[list[int]]:
        dialogues = [
            [*prompt, {"role": "assistant", "content": response}]
            for prompt, response in zip(asked.prompts, asked.responses, strict=True)
        ]
        rows = encode(
            render_dialogues(
                tokenizer, [f"{self.path}, row {row}" for row in range(len(dialogues))], dialogues
            ),
            tokenizer,
        )
        limit = getattr(self.model.config, "max_position_embeddings", None)
        longest = max(range(len(rows)), key=lambda row: len(rows[row]))
        if limit is not None and len(rows[longest]) > limit:
            raise StageError(
                f"{self.path} has {limit} positions, and {len(rows[longest])} tokens are to be scored: the response to "
                f"{asked.prompts[longest]}; lower split.max_prompt_tokens or ppo.sampling.max_response_tokens"
            )
        return rows
