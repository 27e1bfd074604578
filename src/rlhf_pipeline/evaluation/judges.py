"""The judges: each one scores the answers of every policy.

A judge of another package is a function, see docs/extending.md; one of ours is a function and a
line in `texts.load_judges`. Metrics, win rates and reports follow from the judge's name.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from pydantic import TypeAdapter

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.doors import source_file
from rlhf_pipeline.config.evaluate import JUDGE_PREFIX, REWARD_MODEL, EvaluateConfig
from rlhf_pipeline.config.rewards import INPUT_PREFIX as REWARD_PREFIX
from rlhf_pipeline.config.rewards import (
    CallableReward,
    ModelJudge,
    ModelReward,
    PairwiseJudge,
    RegexReward,
    RubricReward,
    SampleReward,
    SampleRewards,
    TrainedReward,
    reads_references,
)
from rlhf_pipeline.distributed.batches import by_micro_batches
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.evaluation.setup import Setup
from rlhf_pipeline.evaluation.texts import AnswerBatch, Judge, by_source
from rlhf_pipeline.models.forward import sequence_scores
from rlhf_pipeline.models.scalar_head import TokenScores
from rlhf_pipeline.rollout.reward_sources import ModelSource
from rlhf_pipeline.runtime.digests import file_digest
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import Manifest


@torch.no_grad()
def by_reward_model(
    answers: AnswerBatch,
    model: TokenScores | DeepSpeedEngine,
    *,
    micro_batch_tokens: int,
    world: World,
) -> list[float]:
    """The reward model's score minus its mean on the chosen answers of held-out comparisons."""
    sequences = answers.scored.sequences
    scores = by_micro_batches(sequence_scores, model, sequences, micro_batch_tokens, world)
    return [score - model.score_mean for score in scores.tolist()]


def model_judges(job: LaunchedJob, setups: Sequence[Setup]) -> Iterator[tuple[str, Judge]]:
    """Load the further reward models, one after the other, with their names.

    Raises ArtifactError if one reads other tokens than the policies, and `retokenize` is off.
    """
    setup, contracts = setups[0], [setup.contract for setup in setups]
    for index, judge in enumerate(setup.config.judges):
        if isinstance(judge, ModelJudge):
            place = f"{JUDGE_PREFIX}{index}"
            folder = job.inputs.get(place) or judge.folder
            if folder is None:
                folder = Path(snapshot_download(judge.model, revision=job.digests[place]))
            reward, tokens = judge.as_reward(folder), setup.config.micro_batch_tokens
            where = setup.config.place_of(judge)
            model = ModelSource.load(reward, folder, where, contracts, tokens, setup.world)
            if judge.folder is not None and place not in job.inputs:
                job.expect_unchanged(place, judge.folder)
            yield judge.label, partial(by_source, source=model)
            del model  # before the next one is loaded


def optimized_judges(
    job: LaunchedJob, candidate: str, config: EvaluateConfig
) -> tuple[set[str], list[str]]:
    """The judges that the candidate's training has optimized, and its rewards with their weights.

    A function counts by its place, or its file and name; a reward model by its content; a judge by
    true answers if a reward reads them, or its file has changed; a chat model by its name and its
    rubric. DPO, which has no rewards, learns from the same comparisons as the trained reward model.
    """
    trained = Manifest.read(job.inputs[f"{candidate}_model"])
    own = next((block for block in trained.config.values() if block.get("rewards")), None)
    if own is None and not {"comparisons", "reward_model"} & trained.inputs.keys():
        return set(), []
    given = ["trained"] if own is None else own["rewards"]
    rewards: Sequence[SampleReward] = TypeAdapter(SampleRewards).validate_python(given)
    found, names, reads_truth = set(), [], False
    optimized: set[tuple[str | None, str | None]] = set()
    for index, reward in enumerate(rewards):
        if not reward.weight:
            continue
        weight = "" if reward.weight == 1 else f"{reward.weight:g} * "
        names.append(f"{weight}{reward.label}")
        content = trained.inputs.get(f"{REWARD_PREFIX}{index}")
        if isinstance(reward, TrainedReward):
            found.add(REWARD_MODEL)
            optimized.add((job.digests.get("reward_model"), None))
        elif isinstance(reward, CallableReward):
            optimized |= {(content, reward.function), (reward.location, reward.function)}
            try:
                unknown = file_digest(source_file(reward.callable)) != content
            except ConfigError:
                unknown = True
            reads_truth |= unknown or reads_references(reward)
        elif isinstance(reward, ModelReward):
            optimized.add((content, None))
        else:
            optimized.add(_asked(reward))
            reads_truth |= reads_references(reward)
    for index, judge in enumerate(config.judges):
        place = f"{JUDGE_PREFIX}{index}"
        match judge:
            case CallableReward(location=file, function=name):
                digest = file_digest(job.inputs[place])
                same = (file, name) in optimized or (digest, name) in optimized
                same |= reads_truth and reads_references(judge)
            case ModelJudge():
                same = (job.digests[place], None) in optimized
            case _:
                same = _asked(judge) in optimized or (reads_truth and reads_references(judge))
        if same:
            found.add(judge.label)
    return found, [] if own is None else names


def _asked(judge: Block) -> tuple[str, str | None]:
    """What a judge looks for, its rubric or its regular expression, and its chat model."""
    match judge:
        case RubricReward():
            return judge.rubric, judge.openai.model
        case PairwiseJudge():
            return "", judge.openai.model
        case RegexReward():
            return judge.regex, None
    return "", None
