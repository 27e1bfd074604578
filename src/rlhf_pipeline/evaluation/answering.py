"""How policies answer and judges score: one model at a time is in memory."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.config.evaluate import JUDGE_PREFIX, EvaluateConfig, own_models
from rlhf_pipeline.config.rewards import ModelReward
from rlhf_pipeline.config.training import FrozenDeepSpeedConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.batches import Rows, by_micro_batches, even_share, sampled_rows
from rlhf_pipeline.distributed.engine import free_memory, frozen_model
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.evaluation.judges import AnswerBatch, Judge, by_source
from rlhf_pipeline.generation.generator import Generator, load_generator, row_seeds
from rlhf_pipeline.generation.records import Answered, Scored, ended
from rlhf_pipeline.models.forward import response_logprobs, sequence_scores
from rlhf_pipeline.models.lean_transformers import PreTrainedModel
from rlhf_pipeline.models.loading import load_policy, saved_precision
from rlhf_pipeline.models.scalar_head import TokenScores, load_scores
from rlhf_pipeline.models.sequences import Sequences, collate
from rlhf_pipeline.rl.rewards import kl_estimate
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import Manifest, artifact_of
from rlhf_pipeline.scoring.chat_model import dialogue
from rlhf_pipeline.scoring.reward_sources import ModelSource
from rlhf_pipeline.scoring.true_answers import accuracy
from rlhf_pipeline.verdict.answers import Answer

Draw = tuple[str, int]  # a policy, and the number of its answer to each prompt
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Setup:
    """What the evaluation of a policy needs."""

    seed: int
    config: EvaluateConfig
    contract: TokenContract
    tokenizer: PreTrainedTokenizerBase
    rows: np.ndarray  # of this rank in the table of prompts; the last may repeat the first of all
    prompts: dict[str, list[Any]]  # columns of these rows
    trust: bool  # whether code that ships with a model may run
    world: World
    place: str = "evaluate"  # the parameters of `config`, for messages


def with_model(
    load: Callable[..., M], folder: Path, setup: Setup, work: Callable[[M | DeepSpeedEngine], None]
) -> None:
    """Load a frozen model, let `work` use it, and free its memory: one model at a time.

    The model has the precision that it was saved in and is sharded as it was trained, unless the
    configuration says otherwise.
    """
    stage = setup.config.zero_stage
    if stage is None:
        artifact = artifact_of(folder) or folder  # the average is inside
        engines = Manifest.read(artifact).deepspeed.values()
        stage = 3 if 3 in [engine["zero_optimization"]["stage"] for engine in engines] else 0
    precision = setup.config.precision or saved_precision(folder)
    settings = FrozenDeepSpeedConfig(zero_stage=stage, precision=precision)
    model = frozen_model(
        partial(load, folder, trust_remote_code=setup.trust), settings, setup.world
    )
    try:
        work(model)
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


def perplexity(policy: nn.Module, folder: Path, setup: Setup) -> float | None:
    """exp of the mean negative log-likelihood per token, as `validation/perplexity` of SFT.

    It is that of at most `evaluate.prompts` validation rows of SFT, which no policy was trained on:
    what training for the judge costs. None if there are fewer rows than ranks.
    """
    table, world = Rows.read(folder / "validation.arrow"), setup.world
    if table.num_rows < world.size:
        return None
    rows = even_share(sampled_rows(table.num_rows, setup.config.prompts, setup.seed), world)
    columns = table.columns(rows)
    ids = columns["prompt_ids"], columns["response_ids"]
    sequences = collate(*ids, setup.contract.pad_id, actions=columns["loss_mask"])
    mask, found = sequences.action_mask, logprobs(policy, sequences, setup, temperature=1.0)
    losses = -found.where(mask, 0.0).double().sum(1)
    own = zip(rows.tolist(), losses.tolist(), mask.sum(1).tolist(), strict=True)
    by_row = {row: (loss, n) for part in world.gather([*own]) for row, loss, n in part}
    total, tokens = (sum(values) for values in zip(*by_row.values(), strict=True))
    return math.exp(min(total / tokens, 700.0))


def answer_all(
    folders: dict[str, Path],
    setups: Mapping[str, Setup],
    baseline_draws: int,
    measure: Callable[[nn.Module, str], None] = lambda policy, name: None,
) -> dict[Draw, Scored]:
    """Let every policy answer the prompts of this rank; log-probabilities by it and the baseline.

    The baseline comes last: it also reads the answers of the others, if they have its tokens.
    `measure` may use each policy, too.
    """
    baseline = next(iter(folders))
    found: dict[Draw, tuple[Sequences, Tensor]] = {}
    scored: dict[Draw, Scored] = {}

    def answer_and_read(policy: PreTrainedModel | DeepSpeedEngine, name: str) -> None:
        setup, config = setups[name], setups[name].config
        read = partial(logprobs, setup=setup, temperature=config.sampling.temperature or 1.0)
        generator = load_generator(
            config.generator, config.sampling, lambda: max(map(len, setup.prompts["prompt_ids"])),
            policy=policy, contract=setup.contract, world=setup.world, hybrid=None,
            gather=config.gather_for_generation, place=f"{setup.place}.generator",
        )  # fmt: skip
        for draw in range(baseline_draws if name == baseline else config.answers_per_prompt):
            sequences = answer(generator, setup, draw)
            found[name, draw] = sequences, read(policy, sequences)
        measure(policy, name)
        for given, (sequences, own) in found.items() if name == baseline else ():
            contract, reference = setups[given[0]].contract, own
            if given[0] != name:
                has_its_tokens = contract == setup.contract
                reference = read(policy, sequences) if has_its_tokens else own * math.nan
            scored[given] = Scored(
                sequences,
                logprobs=own,
                ref_logprobs=reference,
                values=None,
                scores=torch.zeros(len(sequences)),  # the judges come later
                ended=ended(sequences.response_ids, contract),
            )

    for step, (name, folder) in enumerate(reversed(folders.items()), start=1):
        heartbeat.at("rollout", step)
        with_model(load_policy, folder, setups[name], partial(answer_and_read, name=name))
    return scored


def answer(generator: Generator, setup: Setup, draw: int) -> Sequences:
    """Answer the prompts of this rank. Answers of one draw have equal randomness."""
    prompts, rows = setup.prompts["prompt_ids"], setup.rows
    seeds = row_seeds(setup.seed, draw, rows)
    return generator.generate(prompts, setup.config.sampling, seeds, rows.tolist()).sequences


def judge_all(
    scored: Mapping[Draw, Scored],
    job: LaunchedJob,
    judges: Mapping[str, Judge],
    setups: Mapping[str, Setup],
) -> dict[Draw, list[Answer]]:
    """The judged answers of all ranks, by draw. One model at a time is in memory."""
    batches = {draw: _as_text(given, setups[draw[0]]) for draw, given in scored.items()}
    setup = next(iter(setups.values()))
    scores: dict[Draw, dict[str, Sequence[float | None]]] = {draw: {} for draw in batches}

    def judge_by(name: str, judge: Judge) -> None:
        for step, (draw, batch) in enumerate(batches.items(), start=1):
            heartbeat.at("scoring", step)
            with heartbeat.scored_by(name):
                scores[draw][name] = judge(batch)

    for name, places in own_models(job.inputs).items():
        by_model = []
        for place in places:

            def by_own(model: nn.Module, name: str = name) -> None:
                judge_by(name, partial(_by_reward_model, model=model, setup=setup))

            with_model(load_scores, job.inputs[place], setup, by_own)
            by_model.append([scores[draw][name] for draw in batches])
        for draw, given in zip(batches, np.mean(np.array(by_model, float), axis=0), strict=True):
            scores[draw][name] = given.tolist()
    for name, judge in chain(judges.items(), _model_judges(job, [*setups.values()])):
        judge_by(name, judge)
        del judge
        free_memory()
    return {draw: _judged(batch, scores[draw], draw[1], setup) for draw, batch in batches.items()}


def _as_text(scored: Scored, setup: Setup) -> AnswerBatch:
    prompts, ids = setup.prompts, scored.sequences.response_ids
    texts = setup.tokenizer.batch_decode(ids, skip_special_tokens=True)
    responses = [text.strip() for text in texts]
    return AnswerBatch(scored, Answered.of(prompts, responses), prompts["source"])


@torch.no_grad()
def _by_reward_model(
    answers: AnswerBatch, model: TokenScores | DeepSpeedEngine, setup: Setup
) -> list[float]:
    """The score minus the model's mean on the chosen answers of held-out comparisons."""
    sequences, tokens = answers.scored.sequences, setup.config.micro_batch_tokens
    scores = by_micro_batches(sequence_scores, model, sequences, tokens, setup.world)
    return [score - model.score_mean for score in scores.tolist()]


def _model_judges(job: LaunchedJob, setups: Sequence[Setup]) -> Iterator[tuple[str, Judge]]:
    """Load the further reward models, one after the other, with their names. Raises ArtifactError
    if one reads other tokens than the policies, and `retokenize` is off."""
    setup, contracts = setups[0], [setup.contract for setup in setups]
    for index, judge in enumerate(setup.config.judges):
        if isinstance(judge, ModelReward):
            place, on_hub = f"{JUDGE_PREFIX}{index}", judge.on_hub
            folder = job.inputs.get(place, judge.folder)
            if on_hub:
                folder = Path(snapshot_download(judge.path, revision=job.digests[place]))
            where, tokens = setup.config.place_of(judge), setup.config.micro_batch_tokens
            model = ModelSource.load(judge, folder, where, contracts, tokens, setup.world)
            if not on_hub and place not in job.inputs:
                job.expect_unchanged(place, folder)
            yield judge.label, partial(by_source, source=model)
            del model  # before the next one is loaded


def _judged(
    batch: AnswerBatch, scores: Mapping[str, Sequence[float | None]], draw: int, setup: Setup
) -> list[Answer]:
    """The answers of all ranks with their scores, in the order of the prompts, each row once."""
    scored, text = batch.scored, batch.text
    mask = scored.sequences.action_mask
    log_ratios = kl_estimate(scored.logprobs, scored.ref_logprobs, "k1").where(mask, 0.0)
    if setup.config.sampling.temperature == 0:  # no policy samples the most likely tokens
        log_ratios = log_ratios * math.nan
    sft_logprobs = scored.ref_logprobs.where(mask, 0.0)

    def known(value: Tensor) -> float | None:  # NaN: the baseline has other tokens
        return None if value.isnan() else float(value)

    own = [
        Answer(
            row=int(row),
            response=text.responses[i],
            draw=draw,
            prompt=dialogue(text.prompts[i]),
            scores={name: given[i] for name, given in scores.items()},
            kl=known(log_ratios[i].sum()),
            sft_logprob=known(sft_logprobs[i].sum()),
            response_tokens=int(mask[i].sum()),
            ended=bool(scored.ended[i]),
            source=batch.sources[i],
            messages=text.prompts[i],
            right=accuracy(text.references[i], text.responses[i]),
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
