"""The optimizer steps that PPO takes on one rollout."""

import functools

import pytest
import torch
from ppo_runs import ppo_config, run_ppo

from rlhf_pipeline.rl import losses
from rlhf_pipeline.training import experience, ppo_update

ONE = torch.tensor(1)


@pytest.fixture(scope="module")
def trained(ppo_inputs, world, tmp_path_factory):
    return run_ppo(ppo_config(), ppo_inputs, world, tmp_path_factory.mktemp("ppo"))


@pytest.mark.parametrize("tokens", [1, 1000])
def test_micro_batches_do_not_change_the_result(trained, ppo_inputs, world, tmp_path, tokens):
    config = ppo_config(micro_batch_tokens=tokens)
    after = run_ppo(config, ppo_inputs, world, tmp_path).weights("actor")
    for key, value in trained.weights("actor").items():
        torch.testing.assert_close(after[key], value, rtol=1e-5, atol=2e-7)


def test_every_minibatch_of_every_epoch_is_an_optimizer_step(ppo_inputs, world, tmp_path):
    config = ppo_config(minibatch_size=4, ppo_epochs=3)
    run = run_ppo(config, ppo_inputs, world, tmp_path)
    steps = 2 * 3 * 2  # rollouts x epochs x minibatches
    assert run.setup.models.actor.global_steps == run.setup.models.critic.global_steps == steps
    # The rates of the 1st and the 7th of 12 steps of a cosine from 1e-3.
    for name in ("optim/actor_lr", "optim/critic_lr"):
        assert [line[name] for line in run.lines] == pytest.approx([1e-3, 5e-4])


def test_every_epoch_trains_on_other_minibatches(ppo_inputs, world, tmp_path, monkeypatch):
    """Each epoch has all rows once, in another division."""
    original, seen = ppo_update.update_minibatch, []

    def update_minibatch(models, pieces, *args, **options):
        rows = torch.cat([piece.advantages[:, 0] for piece in pieces])
        seen.append(tuple(sorted(rows.tolist())))
        return original(models, pieces, *args, **options)

    monkeypatch.setattr(ppo_update, "update_minibatch", update_minibatch)
    config = ppo_config(steps=1, evaluations=1, minibatch_size=2, ppo_epochs=3)
    run_ppo(config, ppo_inputs, world, tmp_path)
    epochs = [seen[start : start + 4] for start in (0, 4, 8)]
    assert len({tuple(sorted(sum(epoch, ()))) for epoch in epochs}) == 1
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 3


def test_a_minibatch_has_all_responses_to_its_prompts(ppo_inputs, world, tmp_path, monkeypatch):
    """They share the prompt's tokens in a forward pass."""
    original, seen = ppo_update.update_minibatch, []

    def update_minibatch(models, pieces, *args, **options):
        rows = [row for piece in pieces for row in piece.sequences.prompt_ids.tolist()]
        seen.append([tuple(token for token in row if token) for row in rows])
        return original(models, pieces, *args, **options)

    monkeypatch.setattr(ppo_update, "update_minibatch", update_minibatch)
    config = ppo_config(
        steps=1, evaluations=1, minibatch_size=4, ppo_epochs=2, responses_per_prompt=2,
        advantage="rloo", critic=None, rewards=[{"regex": "."}],
    )  # fmt: skip
    run_ppo(config, ppo_inputs, world, tmp_path)
    assert len(seen) == 4
    for prompts in seen:
        assert sorted(map(prompts.count, {*prompts})) == [2, 2]
    assert {*seen[0], *seen[1]} == {*seen[2], *seen[3]}


def test_pooled_batches_equal_one_large_batch(trained, ppo_inputs, world, tmp_path):
    config = ppo_config(rollout_batch_size=2, rollout_batches=4)
    pooled = run_ppo(config, ppo_inputs, world, tmp_path)
    after = pooled.weights("actor")
    assert all(torch.equal(after[key], value) for key, value in trained.weights("actor").items())
    assert pooled.setup.models.actor.global_steps == 2
    assert trained.setup.models.actor.global_steps == 2


def test_an_update_stops_when_the_policy_has_moved_too_far(ppo_inputs, world, tmp_path):
    """In the first epoch the policy is the one that sampled; in the second it exceeds any bound."""
    config = ppo_config(ppo_epochs=4, kl={"stop_update": 1e-8})
    run = run_ppo(config, ppo_inputs, world, tmp_path)
    models = run.setup.models
    assert [line["policy/epochs"] for line in run.lines] == [2, 2]
    assert models.actor.global_steps == models.critic.global_steps == 2 * 2
    # The schedule still ends with the last step.
    assert run.setup.models.actor.get_lr() == [pytest.approx(0.0)]


def test_an_entropy_bonus_raises_the_entropy(trained, ppo_inputs, world, tmp_path):
    bonus = run_ppo(ppo_config(entropy_coef=10.0), ppo_inputs, world, tmp_path).lines
    assert bonus[0]["policy/entropy"] == trained.lines[0]["policy/entropy"]
    assert bonus[1]["policy/entropy"] > trained.lines[1]["policy/entropy"] + 1e-4


@pytest.mark.parametrize(("coef", "place", "norms"), [(0.2, "loss", 2.0), (0.1, "reward", 0.0)])
def test_the_kl_reaches_the_loss_with_its_coefficient(
    ppo_inputs, world, tmp_path, monkeypatch, coef, place, norms
):
    """A loss that is nothing but the KL has twice the gradient with twice the coefficient.

    With a clip of gradients at 1, the norms before the clip are compared.
    """

    def first_norm(folder, **kl):
        config = ppo_config(steps=1, evaluations=1, kl=kl)
        return run_ppo(config, ppo_inputs, world, folder).lines[0]["optim/actor_grad_norm"]

    monkeypatch.setattr(losses, "policy_loss", lambda logprobs, *_, **__: (0 * logprobs.sum(), ONE))
    monkeypatch.setattr(
        ppo_update,
        "kl_loss",
        lambda logprobs, old, ref, mask, **_: (torch.where(mask, logprobs, 0.0).sum(), mask.sum()),
    )
    unit = first_norm(tmp_path / "unit", coef=0.1, place="loss")
    found = first_norm(tmp_path / "changed", coef=coef, place=place)
    assert unit > 1e-3 and found == pytest.approx(norms * unit, rel=1e-4)


@pytest.mark.parametrize(
    "largest",
    [{}, {"entropy_coef": 1000.0}, {"kl": {"place": "loss", "coef": 1000.0}}],
    ids=["policy", "entropy", "kl"],
)
def test_the_denominator_holds_for_each_loss_and_counts_what_trains(
    ppo_inputs, world, tmp_path, monkeypatch, largest
):
    """Seven responses train. `constant` divides by 7 * 110 in place of their tokens."""
    original, seen = ppo_update.update_minibatch, []

    def update_minibatch(models, pieces, *args, **options):
        seen.append([piece.sequences.action_mask for piece in pieces])
        return original(models, pieces, *args, **options)

    def norm(denominator):
        config = ppo_config(
            steps=1, evaluations=1, advantage="reinforce", critic=None, truncated="mask",
            denominator=denominator, sampling={"max_response_tokens": 110}, **largest,
        )  # fmt: skip
        return run_ppo(config, ppo_inputs, world, tmp_path / denominator).lines[0]

    monkeypatch.setattr(ppo_update, "update_minibatch", update_minibatch)
    monkeypatch.setattr(experience, "trained_rows", lambda *_: torch.arange(8) > 0)
    # The policy is the reference, so that the KL itself has no gradient.
    monkeypatch.setattr(
        ppo_update, "kl_loss", lambda logprobs, old, ref, mask, reduce: reduce(logprobs, mask)
    )
    lines = {name: norm(name) for name in ("tokens", "constant")}
    rows = [int(mask.any(1).sum()) for mask in seen[0]]
    assert sum(rows) == sum(map(len, seen[0])) == 7
    tokens = sum(int(mask.sum()) for mask in seen[0])
    assert 7 < tokens < 7 * 110 and len(seen[0]) > 1
    by_tokens, by_constant = (line["optim/actor_grad_norm"] for line in lines.values())
    assert by_constant == pytest.approx(by_tokens * tokens / (7 * 110), rel=2e-5)
    assert lines["constant"]["policy/entropy"] == pytest.approx(lines["tokens"]["policy/entropy"])


def test_a_rank_with_fewer_rows_that_train_computes_others(on_threads):
    trained = torch.tensor([True, False, True, True]), torch.tensor([False, False, False, True])
    drawn = [torch.tensor([0, 1]), torch.tensor([3, 2])]
    first, second = on_threads(
        2, lambda world: ppo_update._only_trained(drawn, trained[world.rank], world)
    )
    assert [rows.tolist() for rows in first] == [[0], [3, 2]]
    assert [rows.tolist() for rows in second] == [[0], [3, 2]]


def test_the_clip_range_reaches_the_loss(ppo_inputs, world, tmp_path, monkeypatch):
    clip_ranges = []
    original = losses.policy_loss

    @functools.wraps(original)
    def policy_loss(*args, **options):
        clip_ranges.append(options["clip_range_high"])
        return original(*args, **options)

    monkeypatch.setattr(losses, "policy_loss", policy_loss)
    config = ppo_config(clip_range_high=0.3, steps=1, evaluations=1)
    run_ppo(config, ppo_inputs, world, tmp_path)
    assert set(clip_ranges) == {0.3}
