"""How policies answer and judges score: one model at a time is in memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.config.evaluate import EvaluateConfig, own_models
from rlhf_pipeline.config.rewards import GOLD
from rlhf_pipeline.config.sample import SampleConfig
from rlhf_pipeline.config.training import FrozenDeepSpeedConfig
from rlhf_pipeline.data.records import dialogue
from rlhf_pipeline.data.sources.synthetic import gold_score
from rlhf_pipeline.data.token_contract import Reader, TokenContract
from rlhf_pipeline.distributed.batches import Rows, by_micro_batches, even_share, sampled_rows
from rlhf_pipeline.distributed.engine import free_memory, frozen_model
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.distributed.zero import DeepSpeedEngine
from rlhf_pipeline.episodes.loop import Episodes, load_episodes
from rlhf_pipeline.generation.generator import Generator, load_generator, respond, row_seeds
from rlhf_pipeline.generation.records import Rollout, Scored, ended, response_texts
from rlhf_pipeline.models import PreTrainedModel
from rlhf_pipeline.models.forward import response_logprobs
from rlhf_pipeline.models.loading import load_policy, saved_precision
from rlhf_pipeline.models.scalar_head import TokenScores, load_scores
from rlhf_pipeline.models.sequences import Sequences, collate
from rlhf_pipeline.rl.rewards import kl_estimate
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import Manifest, artifact_of
from rlhf_pipeline.scoring.answers import Answered, Source
from rlhf_pipeline.scoring.reward_sources import ModelSource, Reading
from rlhf_pipeline.scoring.true_answers import accuracy
from rlhf_pipeline.verdict.answers import Answer

Draw = tuple[str, int]  # a policy, and the number of its answer to each prompt
Scores = Sequence[float | None]
"""The scores of the answers of one draw; None for a prompt that the judge cannot judge."""
M = TypeVar("M", bound=nn.Module)
R = TypeVar("R")


@dataclass(frozen=True)
class Setup:
    """What the evaluation of a policy needs."""

    seed: int
    config: EvaluateConfig | SampleConfig
    contract: TokenContract
    tokenizer: PreTrainedTokenizerBase
    rows: np.ndarray  # of this rank in the table of prompts; the last may repeat the first of all
    prompts: dict[str, list[Any]]  # columns of these rows
    trust: bool  # whether code that ships with a model may run
    world: World
    place: str = "evaluate"  # the parameters of `config`, for messages


def with_model(
    load: Callable[..., M], folder: Path, setup: Setup, work: Callable[[M | DeepSpeedEngine], R]
) -> R:
    """Load a frozen model, let `work` use it, and free its memory: one model at a time.

    The model has the precision that it was saved in and is sharded as it was trained, unless the
    configuration says otherwise.
    """
    stage = setup.config.zero_stage
    if stage is None:
        artifact = artifact_of(folder) or folder  # the average is inside
        engines = Manifest.read(artifact).deepspeed  # of PPO also critic, reference, reward model
        own = [engines["actor"]] if "actor" in engines else engines.values()
        stage = 3 if 3 in [engine["zero_optimization"]["stage"] for engine in own] else 0
    precision = setup.config.precision or saved_precision(folder)
    settings = FrozenDeepSpeedConfig(zero_stage=stage, precision=precision)
    model = frozen_model(
        partial(load, folder, trust_remote_code=setup.trust), settings, setup.world
    )
    try:
        return work(model)
    finally:
        if isinstance(model, DeepSpeedEngine):
            model.destroy()
        del model
        free_memory()


@torch.no_grad()
def logprobs(
    policy: nn.Module, sequences: Sequences, setup: Setup, *, temperature: float
) -> Tensor:
    """Log-probability of each token of the responses, (B, R)."""
    size, tokens = setup.contract.vocab_size, setup.config.micro_batch_tokens
    function = partial(response_logprobs, vocab_size=size, temperature=temperature)
    return by_micro_batches(function, policy, sequences, tokens, setup.world)


def perplexity(policy: nn.Module, folder: Path, setup: Setup, prompts: int) -> float | None:
    """exp of the mean negative log-likelihood per token, as `validation/perplexity` of SFT.

    It is that of at most `prompts` validation rows of SFT, which no policy was trained on:
    what training for the judge costs. None if there are fewer rows than ranks.
    """
    table, world = Rows.read(folder / "validation.arrow"), setup.world
    if table.num_rows < world.size:
        return None
    rows = even_share(sampled_rows(table.num_rows, prompts, setup.seed), world)
    columns = table.columns(rows)
    ids = columns["prompt_ids"], columns["response_ids"]
    sequences = collate(*ids, setup.contract.pad_id, actions=columns["loss_mask"])
    mask, own_logprobs = sequences.action_mask, logprobs(policy, sequences, setup, temperature=1.0)
    losses = -own_logprobs.where(mask, 0.0).double().sum(1)
    own = zip(rows.tolist(), losses.tolist(), mask.sum(1).tolist(), strict=True)
    by_row = {row: (loss, n) for part in world.gather([*own]) for row, loss, n in part}
    total, tokens = (sum(values) for values in zip(*by_row.values(), strict=True))
    return math.exp(min(total / tokens, 700.0))


def answer_all(
    folders: dict[str, Path],
    setups: Mapping[str, Setup],
    job: LaunchedJob,
    draws: int,
    baseline_draws: int,
    measure: Callable[[nn.Module, str], None] = lambda policy, name: None,
) -> dict[Draw, Scored]:
    """Let every policy answer the prompts of this rank; log-probabilities by it and the baseline.

    `draws` are the answers of each policy to a prompt, and `baseline_draws` those of the baseline.
    The baseline comes last: it also reads the answers of the others, if they have its tokens.
    `measure` may use each policy, too.
    """
    baseline = next(iter(folders))
    answers: dict[Draw, tuple[Rollout, Tensor]] = {}
    scored: dict[Draw, Scored] = {}

    def answer_and_read(policy: PreTrainedModel | DeepSpeedEngine, name: str) -> None:
        setup, config = setups[name], setups[name].config
        read = partial(logprobs, setup=setup, temperature=config.sampling.temperature or 1.0)
        reader = Reader(setup.tokenizer, setup.contract)
        episodes = load_episodes(config, reader, job, setup.world, setup.place)
        longest = max(map(len, setup.prompts["prompt_ids"]))
        if config.has_turns:
            longest = config.longest_prompt(config.sampling)
        generator = load_generator(
            config.generator, config.sampling, lambda: longest,
            policy=policy, contract=setup.contract, world=setup.world, hybrid=None,
            gather=config.gather_for_generation, place=f"{setup.place}.generator",
        )  # fmt: skip
        for draw in range(baseline_draws if name == baseline else draws):
            rollout = answer(generator, episodes, setup, draw)
            answers[name, draw] = rollout, read(policy, rollout.sequences)
        measure(policy, name)
        for answered, (rollout, own) in answers.items() if name == baseline else ():
            contract, reference = setups[answered[0]].contract, own
            sequences = rollout.sequences
            if answered[0] != name:
                has_its_tokens = contract == setup.contract
                reference = read(policy, sequences) if has_its_tokens else own * math.nan
            scored[answered] = Scored(
                sequences,
                logprobs=own,
                ref_logprobs=reference,
                values=None,
                scores=torch.zeros(len(sequences)),  # the judges come later
                ended=ended(sequences, contract),
                episodes=rollout.episodes,
            )

    for step, (name, folder) in enumerate(reversed(folders.items()), start=1):
        heartbeat.begin_phase("rollout", step)
        with_model(load_policy, folder, setups[name], partial(answer_and_read, name=name))
    return scored


def answer(generator: Generator, episodes: Episodes | None, setup: Setup, draw: int) -> Rollout:
    """Answer the prompts of this rank. Answers of one draw have equal randomness."""
    rows, seeds = setup.rows.tolist(), row_seeds(setup.seed, draw, setup.rows)
    prompts = setup.prompts | {"prompt_number": rows}
    return respond(generator, episodes, prompts, setup.config.sampling, seeds, (setup.seed,))


def judge_all(
    scored: Mapping[Draw, Scored],
    job: LaunchedJob,
    judges: tuple[Mapping[str, Source], Mapping[str, Callable[..., Any]]],
    setups: Mapping[str, Setup],
) -> dict[Draw, list[Answer]]:
    """The judged answers of all ranks, by draw, with judges from `load_judges`. One model at a time
    is in memory."""
    setup, (sources, models) = next(iter(setups.values())), judges
    texts = {draw: _as_text(one, setups[draw[0]]) for draw, one in scored.items()}
    scores: dict[str, list[Scores]] = {}  # by judge, of each draw

    def by_draw(name: str, judge: Callable[[Draw], Scores]) -> list[Scores]:
        found = []
        for step, draw in enumerate(scored, start=1):
            heartbeat.begin_phase("scoring", step)
            with heartbeat.scored_by(name):
                found.append(judge(draw))
        return found

    def by_source(name: str, source: Source) -> list[Scores]:
        return by_draw(name, lambda draw: source(scored[draw], texts[draw]))

    contracts = [each.contract for each in setups.values()]
    reading = Reading(contracts, setup.config.micro_batch_tokens, setup.world)

    def by_own(model: TokenScores | DeepSpeedEngine, name: str, folder: Path) -> list[Scores]:
        return by_source(name, ModelSource.of_pipeline(folder, model, job, reading))

    for name, places in own_models(job.inputs).items():
        by_model = [
            with_model(load_scores, folder, setup, partial(by_own, name=name, folder=folder))
            for folder in (job.inputs[place] for place in places)
        ]
        scores[name] = np.mean(np.array(by_model, float), axis=0).tolist()

    def by_gold(draw: Draw) -> Scores:
        asked, text = setups[draw[0]].prompts["source"], texts[draw]
        if setup.config.environment is not None:  # the source knows its own prompts alone
            asked = [None] * len(asked)
        rows = zip(asked, text.prompts, text.responses, strict=True)
        return [gold_score(*row) for row in rows]

    scores[GOLD] = by_draw(GOLD, by_gold)
    for name, source in sources.items():
        scores[name] = by_source(name, source)
    for name, load in models.items():
        scores[name] = by_source(name, load(reading))
        free_memory()
    judged = {}
    for place, (draw, one) in enumerate(scored.items()):
        own = {name: of_draws[place] for name, of_draws in scores.items()}
        judged[draw] = _judged(one, texts[draw], own, draw[1], setup)
    return judged


def _as_text(scored: Scored, setup: Setup) -> Answered:
    return Answered.of(setup.prompts, response_texts(scored, setup.tokenizer), scored.episodes)


def _judged(
    scored: Scored, text: Answered, scores: Mapping[str, Scores], draw: int, setup: Setup
) -> list[Answer]:
    """The answers of all ranks with their scores, in the order of the prompts, each row once."""
    mask = scored.sequences.action_mask
    log_ratios = kl_estimate(scored.logprobs, scored.ref_logprobs, "k1").where(mask, 0.0)
    if setup.config.sampling.temperature == 0:  # no policy samples the most likely tokens
        log_ratios = log_ratios * math.nan
    sft_logprobs = scored.ref_logprobs.where(mask, 0.0)

    said = text.responses
    if scored.episodes is not None:  # judges of pairs, and readers, see all turns
        said = [one.text for one in scored.episodes]

    def known(value: Tensor) -> float | None:  # NaN: the baseline has other tokens
        return None if value.isnan() else float(value)

    own = [
        Answer(
            row=int(row),
            response=said[i],
            draw=draw,
            prompt=dialogue(text.prompts[i]),
            scores={name: judged[i] for name, judged in scores.items()},
            kl=known(log_ratios[i].sum()),
            sft_logprob=known(sft_logprobs[i].sum()),
            response_tokens=int(mask[i].sum()),
            ended=bool(scored.ended[i]),
            source=setup.prompts["source"][i],
            messages=text.prompts[i],
            right=accuracy(text.references[i], text.responses[i]),
            episode=scored.episodes[i].record() if scored.episodes is not None else None,
        )
        for i, row in enumerate(setup.rows)
    ]
    parts = setup.world.gather([asdict(answer) for answer in own])
    by_row = {fields["row"]: Answer(**fields) for part in parts for fields in part}
    return [by_row[row] for row in sorted(by_row)]


def in_order(policy: str, draws: Mapping[Draw, list[Answer]], count: int) -> list[Answer]:
    """The first draws of a policy together: the answers to one prompt follow each other."""
    drawn = (draws[policy, draw] for draw in range(count))
    return [*chain.from_iterable(zip(*drawn, strict=True))]
