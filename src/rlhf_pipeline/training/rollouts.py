"""The rollout of a step: prompts, sampled responses, and their scores by all models.

The slots of the prompts and the order of the rows are those of `training.prompts`.

What sampling does not need can leave the GPU for main memory meanwhile. A storage gives up its
memory and gets other memory later. It stays the same object, so DeepSpeed's own views of it stay
valid at every ZeRO stage. `DeepSpeedEngine.offload_states` makes new tensors instead, has nothing
for stage 0, and refuses torch's AdamW at stage 3.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhf_pipeline.distributed.batches import Rows, by_micro_batches, micro_batches, own_share
from rlhf_pipeline.distributed.engine import free_memory, release_freed
from rlhf_pipeline.distributed.engine_state import saved_tensors
from rlhf_pipeline.distributed.world import on_gpu
from rlhf_pipeline.distributed.zero import get_accelerator
from rlhf_pipeline.generation.generator import Seed, respond, row_seeds
from rlhf_pipeline.generation.records import Rollout, Scored, TrainingPass, ended
from rlhf_pipeline.models.forward import response_logprobs, response_values, sequence_scores
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.training.experience import actor_pass, equal_groups, groups, training_scores
from rlhf_pipeline.training.ppo_setup import Setup

Columns = dict[str, list[Any]]
"""Columns of the prompts' table, and `prompt_number`, the row of the table."""
PIECE = 2**24
"""Bytes of a pinned copy. Torch reserves a power of two for each and keeps it for the next time."""


def training_prompts(setup: Setup, step: int) -> tuple[Columns, list[Seed]]:
    """The prompts of this rank in a training step, and the seed of each response."""
    count = setup.config.prompts_per_step
    slots, prompts = np.arange(count), setup.stream.draw(count)
    return of_slots(setup, own_share(prompts, setup.world), own_share(slots, setup.world), step)


def of_slots(
    setup: Setup, prompts: np.ndarray, slots: np.ndarray, step: int, attempt: int = 0
) -> tuple[Columns, list[Seed]]:
    """A first response to the prompt of every slot, then a second one to every prompt, and so on.

    The seed of a response depends on its slot, not on the rank that samples it.
    """
    config = setup.config
    rows = columns_of(setup.prompts, np.tile(prompts, config.responses_per_prompt))
    repeats = np.arange(config.responses_per_prompt)[:, None] * config.prompts_per_step
    numbers = (repeats + slots).flatten() + attempt * config.responses_per_step
    return rows, row_seeds(setup.seed, step, numbers)


def columns_of(table: Rows, numbers: np.ndarray) -> Columns:
    """The rows of a table of prompts with these numbers."""
    return table.columns(numbers) | {"prompt_number": numbers.tolist()}


def roll_out(setup: Setup, rows: Columns, seeds: list[Seed], step: int | None = None) -> Rollout:
    """Sample a response to each prompt. Without a step, the prompts are those of an evaluation."""
    heartbeat.begin_phase("evaluation" if step is None else "rollout", step)
    models, away = setup.models, setup.config.offload_during_rollout
    staying = weights(models.actor)
    with in_main_memory(held(setup), staying) if away else nullcontext():
        how = models.generator, models.episodes
        rollout = respond(*how, rows, setup.config.sampling, seeds, (setup.seed, step or 0))
    release_freed()  # the update needs as much memory, in blocks of other sizes
    return rollout


def held(setup: Setup) -> Iterator[Tensor]:
    """What a rank holds at all times: weights, and what their optimizers and averages need."""
    yield from chain(*map(weights, setup.models.engines().values()))
    for name, engine in setup.checkpoints.engines.items():
        yield from chain(*saved_tensors(engine, setup.checkpoints.averages.get(name)).values())
        if engine.zero_optimization_stage() == 3:
            yield engine.optimizer.grad_partitions_flat_buffer


def weights(model: nn.Module) -> Iterator[Tensor]:
    """The weights of a model: whole ones, and the own parts of sharded ones."""
    for parameter in model.parameters():
        yield from (parameter.data, getattr(parameter, "ds_tensor", parameter.data))


@contextmanager
def in_main_memory(tensors: Iterable[Tensor], staying: Iterable[Tensor]) -> Iterator[None]:
    """Keep `tensors` in main memory inside the block, where nothing may read or write them.

    What shares memory with those that are `staying` stays, too.
    """
    needed = {tensor.untyped_storage().data_ptr() for tensor in staying}
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type != "cpu"]
    moved = []
    for pointer, storage in {storage.data_ptr(): storage for storage in storages}.items():
        if pointer in needed:
            continue
        own = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).split(PIECE)
        copies = [torch.empty(len(x), dtype=torch.uint8, pin_memory=on_gpu()) for x in own]
        torch._foreach_copy_(copies, own, non_blocking=True)
        moved.append((storage, storage.nbytes(), own, copies))
        storage.resize_(0)
        heartbeat.report_progress()
    free_memory()  # whole blocks, before something lasting takes a part of them
    try:
        yield
    finally:
        for storage, size, own, copies in moved:
            storage.resize_(size)
            torch._foreach_copy_(own, copies, non_blocking=True)
            heartbeat.report_progress()
        get_accelerator().synchronize()  # ZeRO-3 gathers on a stream that waits for no other


def score(
    setup: Setup, rollout: Rollout, rows: Columns, *, held_out: bool = False, trains: bool = False
) -> Scored:
    """Score the responses by all models and by `ppo.rewards`. Held-out ones need no critic."""
    heartbeat.begin_phase("evaluation" if held_out else "scoring")
    rewards = setup.models.rewards
    begun = rewards.begin(rollout, rows)
    known = rollout.logprobs if setup.config.old_logprobs == "rollout" else None
    if setup.config.logprobs_in_update and not held_out:
        known = torch.full_like(rollout.logprobs, torch.nan)
    scored = score_sequences(
        setup, rollout.sequences, with_critic=not held_out, logprobs=known, trains=trains
    )
    sampled = replace(scored, sampler_logprobs=rollout.logprobs, episodes=rollout.episodes)
    return rewards(sampled, rows, begun)


@torch.no_grad()
def score_sequences(
    setup: Setup,
    sequences: Sequences,
    *,
    with_critic: bool = True,
    logprobs: Tensor | None = None,
    trains: bool = False,
) -> Scored:
    """Score sequences by a forward pass of each model.

    `logprobs` (B, R) are those of the actor, if they are known. `trains` keeps the graphs of actor
    and critic for the loss, in one forward pass for all rows.
    """
    models, config, world = setup.models, setup.config, setup.world
    logprobs_of = partial(
        response_logprobs,
        vocab_size=models.contract.vocab_size,
        temperature=config.sampling.temperature,
    )
    run = partial(
        by_micro_batches, sequences=sequences, tokens=config.micro_batch_tokens, world=world
    )
    if config.has_teacher and with_critic:  # the loss compares with the teacher
        ref_logprobs = torch.full(sequences.response_ids.shape, torch.nan)
    else:
        ref_logprobs = run(logprobs_of, models.reference)
    scores = torch.zeros(len(sequences))
    if models.reward_model is not None and models.rewards.trained_reads_tokens:
        scores = run(sequence_scores, models.reward_model)
    # Last, because an actor with adapters is its own reference.
    kept = with_graphs(setup, sequences) if trains else None
    if logprobs is None:
        logprobs = run(logprobs_of, models.actor) if kept is None else kept.logprobs.detach().cpu()
    values = None
    if kept is not None and kept.values is not None:
        values = kept.values.detach().cpu()
    elif with_critic and models.critic is not None:
        values = run(response_values, models.critic)
    is_ended = ended(sequences, models.contract)
    return Scored(
        sequences=sequences, logprobs=logprobs, ref_logprobs=ref_logprobs, values=values,
        scores=scores, ended=is_ended, training_pass=kept,
    )  # fmt: skip


@torch.enable_grad()
def with_graphs(setup: Setup, sequences: Sequences) -> TrainingPass:
    """The outputs of actor and critic for their losses, for all rows in one forward pass."""
    batch, critic = sequences.to(setup.world.device), setup.models.critic
    logprobs, entropy = actor_pass(setup.models, batch, setup.config)
    heartbeat.report_progress()
    values = None if critic is None else response_values(critic, batch)
    heartbeat.report_progress()
    return TrainingPass(logprobs, entropy, values)


def one_pass(setup: Setup, rollout: Rollout, step: int) -> bool:
    """Whether scoring and the update can share the forward passes of actor and critic: neither the
    models nor the rows change in between, and all rows fit a pass."""
    config, models = setup.config, setup.models
    changes = config.ppo_epochs * config.updates_per_epoch > 1 or config.equal_groups == "resample"
    alone = config.has_teacher or config.logprobs_in_update
    if changes or alone or step <= config.critic_warmup_steps:
        return False
    lengths, tokens = [rollout.sequences.lengths], config.micro_batch_tokens
    (found,) = micro_batches(lengths, tokens, models.actor, setup.world)
    return len(found) == 1


def resample(
    setup: Setup, scored: Scored, rows: Columns, step: int
) -> tuple[Scored, dict[str, float]]:
    """Replace prompts whose responses have equal scores by the next ones of the stream.

    The slots get them in their order over all ranks, so the step is the same for any number of
    ranks. Returns the rollout, and metrics of what was left out.
    """
    config, world, further = setup.config, setup.world, 0
    count, repeats = config.prompts_per_step, torch.arange(config.responses_per_prompt)[:, None]
    left_out = setup.stream.left_out
    note_solved(setup, scored, rows["prompt_number"][: count // world.size])
    for attempt in range(1, config.maximum_resamples + 1):
        if config.equal_groups != "resample":
            break
        own = equal_groups(scored, config).nonzero().squeeze(1)  # places among this rank's slots
        missing = sorted(chain(*world.gather((own * world.size + world.rank).tolist())))
        if not missing:
            break
        further += len(missing)
        drawn = dict(zip(missing, setup.stream.draw(len(missing)).tolist(), strict=True))
        # All ranks sample equally many rows; those beyond a rank's own slots are not used.
        most = max(Counter(slot % world.size for slot in missing).values())
        mine = [slot for slot in missing if slot % world.size == world.rank]
        slots = np.array(mine + missing[:1] * (most - len(mine)))
        prompts = np.array([drawn[slot] for slot in slots])
        more, seeds = of_slots(setup, prompts, slots, step, attempt)
        fresh = score(setup, roll_out(setup, more, seeds, step), more)
        note_solved(setup, fresh, more["prompt_number"][: len(mine)])
        others = repeats * most + torch.arange(len(mine))
        places = repeats * (count // world.size) + own
        scored = scored.replaced(places.flatten(), fresh, others.flatten())
    metrics = {"rollout/resampled": further} if config.equal_groups == "resample" else {}
    if config.curriculum is not None:
        metrics["rollout/left_out"] = setup.stream.left_out - left_out
    return scored, {name: number / count for name, number in metrics.items()}


def note_solved(setup: Setup, scored: Scored, prompts: Sequence[int]) -> None:
    """Tell the curriculum the share of right responses to each prompt, on all ranks."""
    if (curriculum := setup.config.curriculum) is None:
        return
    right = training_scores(scored, setup.config) >= curriculum.solved
    shares = groups(right.double(), setup.config).mean(0)[: len(prompts)].tolist()
    for found in setup.world.gather([[*pair] for pair in zip(prompts, shares, strict=True)]):
        setup.stream.record(dict(found))
