"""Rollouts: what is resampled, on one rank and on two that are threads; scores; freed memory."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch
from ppo_runs import ppo_config, ppo_setup_of
from strict_device import StrictDevice

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.generation.records import Rollout, Scored, ended
from rlhf_pipeline.models.forward import response_logprobs, response_values, sequence_scores
from rlhf_pipeline.models.loading import freeze, load_policy, load_tokenizer
from rlhf_pipeline.models.scalar_head import load_scores
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.scoring.reward_sources import RewardSum, WeightedSource
from rlhf_pipeline.training import rollouts
from rlhf_pipeline.training.prompts import PromptStream
from rlhf_pipeline.training.rollouts import in_main_memory, score_sequences, weights

COUNT = 32


def config_of(**changes) -> PPOConfig:
    fields = {
        "advantage": "grpo", "critic": None, "responses_per_prompt": 2, "score_clip": None,
        "equal_groups": "resample", "missing_eos_penalty": 0.0,
    }  # fmt: skip
    return ppo_config(**fields | changes)


class Prompts:
    """A table whose prompts are their own numbers."""

    def columns(self, numbers):
        return {"prompt_ids": [[int(number) + 1] for number in numbers]}


@pytest.fixture
def step(on_threads, monkeypatch):
    """Runs the rollout of a step; returns prompts, scores and metrics, in the order of one rank.

    The responses to every third prompt differ in their scores.
    """

    def roll_out(setup, rows, seeds, step):
        return rows["prompt_number"], seeds

    def score(setup, rollout, rows, **_):
        numbers, seeds = rollout
        setup.seeds.extend(seeds)
        sequences = collate([[n + 1] for n in numbers], [[9]] * len(numbers), 0)
        slots = [slot for *_, slot in seeds]
        pairs = zip(numbers, slots, strict=True)
        scores = torch.tensor([float(slot) if n % 3 == 0 else 1.0 for n, slot in pairs])
        zeros = torch.zeros(len(numbers), 1)
        ended = torch.ones(len(numbers), dtype=torch.bool)
        return Scored(sequences, zeros, zeros, None, scores, ended, clipped_scores=scores)

    monkeypatch.setattr(rollouts, "roll_out", roll_out)
    monkeypatch.setattr(rollouts, "score", score)

    def run(ranks: int, config: PPOConfig):
        def one(world):
            stream = PromptStream(COUNT, 1, config.curriculum)
            setup = SimpleNamespace(
                config=config, world=world, stream=stream, prompts=Prompts(), seed=1, seeds=[]
            )
            rows, seeds = rollouts.training_prompts(setup, 1)
            first = score(setup, roll_out(setup, rows, seeds, 1), rows)
            scored, metrics = rollouts.resample(setup, first, rows, 1)
            if ranks == 1:  # with more, some rows fill gaps
                assert len({*setup.seeds}) == len(setup.seeds)
            prompts = scored.sequences.prompt_ids[:, -1] - 1
            return prompts, scored.scores, metrics, stream.state()

        found = list(zip(*on_threads(ranks, one), strict=True))
        prompts, scores = (torch.stack(parts, dim=1).flatten().tolist() for parts in found[:2])
        return prompts, scores, found[2][0], found[3][0]

    return run


def test_equal_groups_get_other_prompts(step):
    """Of four prompts with two responses each, all differ in the end, and nothing else changes."""
    prompts, scores, metrics, state = step(1, config_of())
    assert prompts[:4] == prompts[4:] and all(number % 3 == 0 for number in prompts)
    assert all(first != second for first, second in zip(scores[:4], scores[4:], strict=True))
    assert metrics == {"rollout/resampled": (state["drawn"] - 4) / 4} and state["drawn"] > 4
    kept, _, none, state = step(1, config_of(equal_groups="keep"))
    assert none == {} and state["drawn"] == 4
    assert all(new == old for new, old in zip(prompts, kept, strict=True) if old % 3 == 0)


@pytest.mark.parametrize("limit", [1, 10])
def test_any_number_of_ranks_makes_the_same_step(step, limit):
    config = config_of(maximum_resamples=limit, curriculum={"solved": 1.0, "passes": 1})
    assert step(2, config) == step(1, config)


@pytest.mark.parametrize("ranks", [1, 2])
def test_equal_groups_get_the_next_prompts_in_the_order_of_their_slots(step, ranks):
    first = PromptStream(COUNT, 1, None)
    drawn = first.draw(16)
    slots = (drawn % 3 > 0).nonzero()[0].tolist()
    assert slots != sorted(slots, key=lambda slot: slot % 2)  # nor the order of two ranks
    drawn[slots] = first.draw(len(slots))
    config = config_of(rollout_batch_size=32, minibatch_size=32, maximum_resamples=1)
    assert step(ranks, config)[0] == [*drawn, *drawn]


def test_resampled_rows_share_no_forward_pass_with_the_update():
    """The graphs of the pass that scored the first rows would train."""
    setup = SimpleNamespace(config=config_of(), models=None)
    assert not rollouts.one_pass(setup, None, 1)


def test_the_curriculum_hears_of_every_prompt(step):
    """Scores of at least 1 are right: all of other prompts, and of a third prompt those of its
    slots from 1 on."""
    *_, state = step(1, config_of(curriculum={}))
    drawn = PromptStream(COUNT, 1, None).draw(state["drawn"])
    assert {number for number, _ in state["returns"]} >= {*drawn[drawn % 3 > 0].tolist()}
    assert len({*drawn[drawn % 3 > 0]} - {*drawn[:4]}) > 0


# --- scoring by the models ------------------------------------------------------------------------


PROMPTS = [[5, 6, 7], [8], [9, 10]]
RESPONSES = [[20, 1], [21, 22, 23, 24], [25, 26, 1]]


@pytest.fixture(scope="module")
def models(ppo_inputs):
    actor = freeze(load_policy(ppo_inputs["sft_model"], "fp32"))
    scorer = freeze(load_scores(ppo_inputs["reward_model"], "fp32"))
    contract = TokenContract.read(ppo_inputs["sft_model"])
    return SimpleNamespace(
        actor=actor, reference=actor, critic=scorer, reward_model=scorer, contract=contract,
        rewards=SimpleNamespace(trained_reads_tokens=True),
    )  # fmt: skip


def scored_by(models, world, tokens=8):
    sampling = {"temperature": 0.7, "max_response_tokens": 6}
    config = ppo_config(micro_batch_tokens=tokens, sampling=sampling)
    return score_sequences(ppo_setup_of(models, config, world), collate(PROMPTS, RESPONSES, 0))


@pytest.mark.parametrize("tokens", [1, 8, 100])
def test_each_row_is_scored_as_it_is_alone(models, world, tokens):
    scored = scored_by(models, world, tokens)
    assert scored.ended.tolist() == [True, False, True]
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        alone, length = collate([prompt], [response], 0), len(response)
        vocab_size = models.contract.vocab_size
        logprobs = response_logprobs(models.actor, alone, vocab_size=vocab_size, temperature=0.7)
        expected = (logprobs, logprobs, response_values(models.critic, alone))
        found = (scored.logprobs, scored.ref_logprobs, scored.values)
        for whole, part in zip(found, expected, strict=True):
            torch.testing.assert_close(whole[row, :length], part[0], rtol=1e-5, atol=1e-5)
        score = sequence_scores(models.reward_model, alone)
        torch.testing.assert_close(scored.scores[row], score[0], rtol=1e-5, atol=1e-5)


def test_a_response_ended_if_its_last_token_is_an_eos_that_the_policy_chose():
    contract = SimpleNamespace(eos_ids=(1, 24))
    assert ended(collate(PROMPTS, RESPONSES, 0), contract).tolist() == [True, True, True]
    actions = [[True] * len(row) for row in RESPONSES]
    actions[1][-1] = False  # the end of a reply
    given = collate(PROMPTS, [[20, 1, 5], *RESPONSES[1:]], 0, actions=[[True] * 3, *actions[1:]])
    assert ended(given, contract).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("changes", "has_values"),
    [
        ({"critic": None, "reward_model": None}, False),
        ({"rewards": SimpleNamespace(trained_reads_tokens=False)}, True),  # but those of its own
    ],
)
def test_scores_are_zero_unless_a_reward_model_reads_the_tokens(models, world, changes, has_values):
    scored = scored_by(SimpleNamespace(**vars(models) | changes), world)
    assert scored.scores.tolist() == [0.0, 0.0, 0.0]
    assert (scored.values is not None) == has_values


@pytest.mark.parametrize("fails", [False, True])
def test_what_asks_a_server_begins_before_the_models(models, ppo_inputs, world, monkeypatch, fails):
    began, by_models = threading.Event(), rollouts.score_sequences

    class Judge:
        apart = "server"

        def __call__(self, scored, answered):
            began.set()
            if fails:
                raise StageError("the judge is away")
            return [float(len(prompt)) for prompt in answered.prompts]

    def score_sequences(*arguments, **options):
        assert began.wait(60)
        return by_models(*arguments, **options)

    monkeypatch.setattr(rollouts, "score_sequences", score_sequences)
    tokenizer = load_tokenizer(ppo_inputs["sft_model"])
    rewards = RewardSum({"judge": WeightedSource(2.0, math.inf, Judge())}, tokenizer, False)
    own = SimpleNamespace(**vars(models) | {"rewards": rewards})
    rollout = Rollout(collate(PROMPTS, RESPONSES, 0), torch.zeros(3, 4))
    rows = {"messages": [["a"], ["a", "b"], []], "reference": [None] * 3}
    setup = ppo_setup_of(own, ppo_config(), world)
    if fails:
        with pytest.raises(StageError, match="the judge is away"):
            rollouts.score(setup, rollout, rows)
    else:
        assert rollouts.score(setup, rollout, rows).scores.tolist() == [2.0, 4.0, 0.0]


# --- storages that leave a device and come back, on the pretend accelerator -----------------------


@pytest.fixture
def strict(monkeypatch):
    monkeypatch.setattr(rollouts, "PIECE", 8)  # the storages below have several pieces
    with StrictDevice() as device:
        yield device


def sizes(*tensors: torch.Tensor) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def test_views_lose_their_memory_and_get_equal_numbers_back(strict):
    master = torch.arange(5.0, device=strict.device)
    view, moment = master[1:3], torch.full((3,), 7, dtype=torch.bfloat16, device=strict.device)
    pointer = view.untyped_storage()._cdata
    with in_main_memory([master, moment, view], staying=[]):
        away = sizes(master, view, moment)
    found = sizes(master, view, moment)  # a tensor without memory could not be shown
    assert away == [0, 0, 0] and found == [20, 20, 6]
    assert view.untyped_storage()._cdata == pointer == master.untyped_storage()._cdata
    assert master.tolist() == [0, 1, 2, 3, 4] and view.tolist() == [1, 2]
    assert moment.tolist() == [7, 7, 7] and strict.has(view)


def test_what_is_needed_or_in_main_memory_already_stays(strict):
    """So the block changes nothing without a GPU, and nothing of `offload_optimizer`."""
    needed, other = torch.ones(4, device=strict.device), torch.ones(2, device=strict.device)
    host = torch.ones(3)
    with in_main_memory([needed[:2], other, host], staying=[needed[2:]]):
        found = sizes(needed, other, host)
    assert found == [16, 0, 12]  # the first half shares memory with what is needed


def test_they_are_back_before_another_stream_reads_them(strict, monkeypatch):
    """The copies do not wait, and ZeRO-3 gathers weights on a stream that waits for no other."""
    done, copy = [], torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda *own, **how: (done.append("copy"), copy(*own, **how))
    )
    accelerator = rollouts.get_accelerator()
    monkeypatch.setattr(type(accelerator), "synchronize", lambda *_: done.append("wait"))
    with in_main_memory([torch.ones(3, device=strict.device)], staying=[]):
        pass
    assert done == ["copy", "copy", "wait"]


def test_an_error_inside_the_block_brings_them_back(strict):
    tensor = torch.ones(3, device=strict.device)
    with pytest.raises(MemoryError), in_main_memory([tensor], staying=[]):
        raise MemoryError
    found = sizes(tensor)
    assert found == [12] and tensor.tolist() == [1, 1, 1]


def test_a_sharded_weight_has_its_share_and_perhaps_the_whole():
    model = torch.nn.Linear(2, 1)
    model.weight.ds_tensor = share = torch.zeros(1)
    found = list(weights(model))
    assert [tensor.data_ptr() for tensor in found] == [
        model.weight.data_ptr(), share.data_ptr(), *[model.bias.data_ptr()] * 2
    ]  # fmt: skip
