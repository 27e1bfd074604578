"""The optimizer steps that PPO takes on one rollout."""

from dataclasses import replace
from itertools import chain, product

import pytest
import torch
from ppo_runs import ppo_config, ppo_setup_of
from tiny_jobs import trained as at_stage

from rlhf_pipeline.generation.records import Experience
from rlhf_pipeline.models import forward
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.training import experience, ppo_update, rollouts
from rlhf_pipeline.training.experience import in_micro_batches, only_trained
from rlhf_pipeline.training.ppo_update import terms_of
from rlhf_pipeline.training.rollouts import roll_out


@pytest.mark.parametrize("tokens", [1, 1000])
def test_micro_batches_do_not_change_the_result(trained, train_ppo, tokens):
    after = train_ppo(micro_batch_tokens=tokens).weights("actor")
    torch.testing.assert_close(after, trained.weights("actor"), rtol=1e-5, atol=2e-7)


def test_every_minibatch_of_every_epoch_is_an_optimizer_step(train_ppo):
    run = train_ppo(minibatch_size=4, ppo_epochs=3)
    steps = 2 * 3 * 2  # rollouts x epochs x minibatches
    assert run.setup.models.actor.global_steps == run.setup.models.critic.global_steps == steps
    # The rates of the 1st and the 7th of 12 steps of a cosine from 1e-3.
    for name in ("optim/actor_lr", "optim/critic_lr"):
        assert [line[name] for line in run.lines] == pytest.approx([1e-3, 5e-4])


def minibatches(trained, world, **changes):
    """The prompts of each minibatch, of eight rows whose prompts are 5, 6, and so on."""
    config = ppo_config(**changes)
    of_prompts = 8 // config.responses_per_prompt
    prompts = [[5 + row % of_prompts] for row in range(8)]
    sequences = collate(prompts, [[20, 1]] * 8, 0)
    rows = Experience(sequences, torch.zeros(8, 2), torch.zeros(8, 2))
    found = in_micro_batches(ppo_setup_of(trained.setup.models, config, world), rows, 1)
    return [
        [ids for piece in pieces for ids in piece.sequences.prompt_ids.flatten().tolist()]
        for pieces in found
    ]


def test_every_epoch_has_all_rows_once_in_another_division(trained, world):
    found = list(map(sorted, minibatches(trained, world, minibatch_size=2, ppo_epochs=3)))
    epochs = [sorted(found[start : start + 4]) for start in (0, 4, 8)]
    assert all(sorted(chain(*epoch)) == list(range(5, 13)) for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) == 3


def test_a_minibatch_has_all_responses_to_its_prompts(trained, world):
    """They share the prompt's tokens in a forward pass."""
    found = minibatches(
        trained, world, minibatch_size=4, ppo_epochs=2, responses_per_prompt=2,
        advantage="rloo", critic=None, rewards=[{"regex": "."}],
    )  # fmt: skip
    assert len(found) == 4
    for prompts in found:
        assert sorted(map(prompts.count, {*prompts})) == [2, 2]
    assert {*found[0], *found[1]} == {*found[2], *found[3]}


def test_pooled_batches_equal_one_large_batch(trained, train_ppo):
    pooled = train_ppo(rollout_batch_size=2, rollout_batches=4)
    after = pooled.weights("actor")
    assert all(torch.equal(after[key], value) for key, value in trained.weights("actor").items())
    assert pooled.setup.models.actor.global_steps == 2
    assert trained.setup.models.actor.global_steps == 2


def test_an_update_stops_when_the_policy_has_moved_too_far(train_ppo):
    """In the first epoch the policy is the one that sampled; in the second it exceeds any bound."""
    run = train_ppo(ppo_epochs=4, kl={"stop_update": 1e-8})
    models = run.setup.models
    assert [line["policy/epochs"] for line in run.lines] == [2, 2]
    assert models.actor.global_steps == models.critic.global_steps == 2 * 2
    assert models.actor.get_lr() == [pytest.approx(0.0)]  # the schedule still ends


def test_an_entropy_bonus_raises_the_entropy(trained, train_ppo):
    bonus = train_ppo(entropy_coef=10.0).lines
    assert bonus[0]["policy/entropy"] == trained.lines[0]["policy/entropy"]
    assert bonus[1]["policy/entropy"] > trained.lines[1]["policy/entropy"] + 1e-4


def test_the_kl_is_either_in_the_loss_or_in_the_reward(train_ppo):
    """With rewards of 0, nothing but the KL trains, from the second step on. In the loss, twice the
    coefficient is twice its gradient; in the reward, the advantages contain it instead."""

    def lines(coef, place):
        return train_ppo(
            f"{coef} {place}", advantage="reinforce", reinforce_baseline="none", critic=None,
            rewards=[{"regex": ".", "weight": 0.0}], kl={"coef": coef, "place": place},
            missing_eos_penalty=0.0, entropy_coef=0.01,
        ).lines  # fmt: skip

    off, reward = lines(0.0, "reward")[1], lines(100.0, "reward")[1]
    once, twice = lines(100.0, "loss")[1], lines(200.0, "loss")[1]
    # The losses of the policy are 0 unless the reward has the penalty.
    assert off["policy/loss"] == once["policy/loss"] == 0 != reward["policy/loss"]
    norms = [line["optim/actor_grad_norm"] for line in (off, reward, once, twice)]
    assert norms[0] * 10 < norms[1] and norms[0] * 10 < norms[2]
    assert norms[3] == pytest.approx(2 * norms[2], rel=0.2)


def test_the_denominator_counts_what_trains(world):
    """Three responses of 2, 5 and no tokens, in two micro batches; cut at 110."""
    rows = [torch.arange(6)[None] < torch.tensor(lengths)[:, None] for lengths in ([2, 5], [0])]
    expected = {"tokens": 7, "sequences": 2, "constant": 2 * 110}
    for denominator, count in expected.items():
        config = ppo_config(denominator=denominator, sampling={"max_response_tokens": 110})
        assert [float(each) for each in terms_of(rows, config, world)] == [7, count, count]
    none = terms_of([torch.zeros(1, 6, dtype=torch.bool)], ppo_config(), world)
    assert [float(each) for each in none] == [1, 1, 1]


@pytest.mark.parametrize("largest", [{}, {"entropy_coef": 1000.0}], ids=["policy", "entropy"])
def test_the_denominator_holds_for_each_loss(train_ppo, largest):
    """`constant` divides by 8 * 110 in place of the tokens; the gradients differ by that factor."""

    def line(denominator):
        return train_ppo(
            denominator, advantage="reinforce", critic=None, denominator=denominator, steps=1,
            evaluations=1, sampling={"max_response_tokens": 110}, **largest,
        ).lines[0]  # fmt: skip

    by_tokens, by_constant = line("tokens"), line("constant")
    factor = by_tokens["rollout/response_tokens"] / 110
    norms = [each["optim/actor_grad_norm"] for each in (by_tokens, by_constant)]
    assert norms[1] == pytest.approx(norms[0] * factor, rel=1e-4)
    assert by_constant["policy/entropy"] == pytest.approx(by_tokens["policy/entropy"])


def test_a_rank_with_fewer_rows_that_train_computes_others(on_threads):
    trained = torch.tensor([True, False, True, True]), torch.tensor([False, False, False, True])
    drawn = [torch.tensor([0, 1]), torch.tensor([3, 2])]
    first, second = on_threads(2, lambda world: only_trained(drawn, trained[world.rank], world))
    assert [rows.tolist() for rows in first] == [[0], [3, 2]]
    assert [rows.tolist() for rows in second] == [[0], [3, 2]]


# --- scoring and the update share forward passes where that is exact ------------------------------


@pytest.fixture
def passes(monkeypatch):
    """The forward passes with a graph of actor and critic, and those without."""
    counts = {"with graph": 0, "without": 0}

    def counted(function):
        def run(model, *args, **options):
            trains = any(parameter.requires_grad for parameter in model.parameters())
            if trains:
                counts["with graph" if torch.is_grad_enabled() else "without"] += 1
            return function(model, *args, **options)

        return run

    for name in ("response_logprobs", "response_logprobs_and_entropy", "response_values"):
        function = counted(getattr(forward, name))
        for module in (experience, rollouts, ppo_update):
            monkeypatch.setattr(module, name, function, raising=False)
    return counts


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_pass_gives_the_same_weights_as_two(train_ppo, monkeypatch, passes, stage):
    """Two steps, each with one optimizer step on all rows."""
    models = {"actor": at_stage(stage), "critic": at_stage(stage)}
    shared = train_ppo("shared", micro_batch_tokens=1000, **models)
    assert passes["with graph"] == 2 * 2
    monkeypatch.setattr("rlhf_pipeline.training.ppo.one_pass", lambda *_: False)
    apart = train_ppo("apart", micro_batch_tokens=1000, **models)
    for name in ("actor", "critic"):
        after, expected = shared.weights(name), apart.weights(name)
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=2e-7)
    for one, other in zip(shared.lines, apart.lines, strict=True):
        assert one.keys() == other.keys()
        assert one["policy/loss"] == pytest.approx(other["policy/loss"], abs=1e-6)


@pytest.mark.parametrize(
    "changes", [{"ppo_epochs": 2}, {"minibatch_size": 4}, {"micro_batch_tokens": 20}]
)
def test_a_policy_that_changes_or_does_not_fit_takes_passes_of_its_own(train_ppo, passes, changes):
    train_ppo(**changes)
    assert passes["without"] > 0


@pytest.mark.parametrize(
    ("correction", "stage", "tokens"),
    [
        pytest.param(how, stage, tokens, marks=[] if number in short else pytest.mark.long)
        for how, short in (  # two of four together have every pair of values
            (None, (0, 3)),
            ({"level": "sequence", "maximum": 1.2}, (1, 2)),
            ({"beyond": "mask", "maximum": 1.2}, (0, 3)),
        )
        for number, (stage, tokens) in enumerate(product((0, 3), (20, 1000)))
    ],
)
def test_one_update_with_the_kl_in_the_loss_needs_one_pass_of_the_actor(
    train_ppo, monkeypatch, passes, tokens, stage, correction
):
    """The sampler claims other log-probabilities, so that half of the rows exceed the maximum."""

    def claimed(*arguments):
        rollout = roll_out(*arguments)
        signs = torch.tensor([1.0, -1.0]).repeat(len(rollout.logprobs))[: len(rollout.logprobs)]
        return replace(rollout, logprobs=rollout.logprobs + 0.3 * signs[:, None])

    monkeypatch.setattr("rlhf_pipeline.training.ppo.roll_out", claimed)
    fields = {
        "advantage": "rloo", "critic": None, "kl": {"place": "loss", "coef": 0.3}, "steps": 3,
        "actor": at_stage(stage), "micro_batch_tokens": tokens, "responses_per_prompt": 2,
        "sampler_correction": correction,
    }  # fmt: skip
    found = train_ppo("one", **fields)
    assert found.setup.config.logprobs_in_update
    one_pass = dict(passes)
    passes.update(dict.fromkeys(passes, 0))
    monkeypatch.setattr(type(found.setup.config), "logprobs_in_update", False)
    monkeypatch.setattr("rlhf_pipeline.training.ppo.one_pass", lambda *_: False)
    expected = train_ppo("two", **fields)
    assert passes["with graph"] == one_pass["with graph"]
    assert passes["without"] >= one_pass["without"] + 3  # evaluations have the others
    weights = found.weights("actor"), expected.weights("actor")
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)
    assert found.lines[2]["objective/kl"] != 0
    for one, other in zip(found.lines, expected.lines, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            if not name.startswith("time/"):
                assert one[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_log_probabilities_of_the_sampler_spare_the_pass_of_the_actor(train_ppo):
    """Their gap to those of the forward pass is rounding, and is reported."""
    sampler = train_ppo("sampler", ppo_epochs=2, old_logprobs="rollout").lines
    again = train_ppo("again", ppo_epochs=2).lines
    for line, other in zip(sampler, again, strict=True):
        assert 0 < line["rollout/logprob_gap"] < 1e-5
        assert 0 < other["rollout/logprob_gap"] < 1e-5
        assert line["policy/loss"] == pytest.approx(other["policy/loss"], abs=1e-4)
