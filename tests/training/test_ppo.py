"""PPO in this process, on one rank, with a real DeepSpeed engine: what must move moves, what must not does not."""

import copy
import json

import numpy as np
import pyarrow as pa
import pytest
import torch

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.data.gold import JUDGES
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.models.loading import load_policy, load_scores
from rlhf_pipeline.rollout.generation import generate
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training import ppo
from rlhf_pipeline.training import ppo_update as update


@pytest.fixture(scope="module")
def inputs(ppo_inputs):
    return ppo_inputs


def config(**changes) -> PPOConfig:
    # A usual eps of 1e-8 would let Adam blow the rounding noise of vanishing gradients up to whole steps.
    model = {"optimizer": {"learning_rate": 1e-3, "warmup_fraction": 0.0, "eps": 1e-4}}
    fields = {
        "steps": 2, "rollout_batch_size": 8, "minibatch_size": 8, "micro_batch_size_per_gpu": 3, "evaluations": 2,
        "sampling": {"max_response_tokens": 6}, "actor": model, "critic": model,
    }  # fmt: skip
    return PPOConfig.model_validate(fields | changes)


def run(config, inputs, world, folder, seed=1):
    """The stage's loop; returns models, the models before, the metrics lines and what was kept."""
    folder.mkdir(exist_ok=True)
    job = LaunchedJob("ppo", "f", seed, {}, inputs, {}, folder, 60.0)
    setup = ppo.set_up(job, config, TokenContract.read(inputs["sft_model"]), world)
    before = {
        name: copy.deepcopy(module(setup.models, name).state_dict())
        for name in setup.models.engines()
    }
    ppo.train(setup)
    lines = [
        json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    return setup.models, before, lines, setup.best


def only_best(checkpoints):
    (best,) = checkpoints.glob("best-*")
    return best


def module(models, name):
    model = getattr(models, name)
    return getattr(model, "module", model)


@pytest.fixture(scope="module")
def trained(inputs, world, tmp_path_factory):
    return run(config(), inputs, world, tmp_path_factory.mktemp("ppo"))


@pytest.mark.parametrize("name", ["reference", "reward_model"])
def test_frozen_models_do_not_change_by_one_bit(trained, name):
    models, before, _, _ = trained
    after = module(models, name).state_dict()
    assert all(torch.equal(after[key], value) for key, value in before[name].items())
    assert not any(parameter.requires_grad for parameter in module(models, name).parameters())


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_trained_models_change_in_every_parameter(trained, name):
    models, before, _, _ = trained
    after = module(models, name).state_dict()
    moved = [key for key, value in before[name].items() if not torch.equal(after[key], value)]
    # A token that occurs nowhere has no gradient, but its row lies in a tensor that moves.
    assert sorted(moved) == sorted(before[name])


def test_at_the_first_step_the_ratio_is_one_and_the_kl_zero(trained):
    first = trained[2][0]
    assert first["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert first["policy/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert first["policy/clip_fraction"] == 0.0
    assert first["objective/kl"] == pytest.approx(0.0, abs=1e-6)
    assert first["objective/kl_k3"] == pytest.approx(0.0, abs=1e-6)
    assert trained[2][1]["objective/kl_k3"] > 1e-6  # and then it moves


def test_repeated_runs_are_equal(trained, inputs, world, tmp_path):
    def numbers(lines):
        return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]

    assert numbers(run(config(), inputs, world, tmp_path)[2]) == numbers(trained[2])


@pytest.mark.parametrize("size", [1, 8])
def test_micro_batches_do_not_change_the_result(trained, inputs, world, tmp_path, size):
    other = run(config(micro_batch_size_per_gpu=size), inputs, world, tmp_path)
    after, expected = (
        module(other[0], "actor").state_dict(),
        module(trained[0], "actor").state_dict(),
    )
    for key, value in expected.items():
        torch.testing.assert_close(after[key], value, rtol=1e-5, atol=2e-7)


def test_minibatches_and_epochs_take_their_optimizer_steps(inputs, world, tmp_path):
    models = run(config(minibatch_size=4, ppo_epochs=3), inputs, world, tmp_path)[0]
    assert (
        models.actor.global_steps == models.critic.global_steps == 2 * 3 * 2
    )  # rollouts x epochs x minibatches


@pytest.mark.parametrize("advantage", ["rloo", "grpo", "reinforce"])
def test_without_a_critic_the_actor_trains_alone(inputs, world, tmp_path, advantage):
    alone = config(
        advantage=advantage,
        critic=None,
        responses_per_prompt=2,
        rollout_batches=2,
        minibatch_size=8,
    )
    models, before, lines, _ = run(alone, inputs, world, tmp_path)
    assert models.critic is None and models.actor.global_steps == 2 * 2
    assert not any(
        torch.equal(module(models, "actor").state_dict()[key], old)
        for key, old in before["actor"].items()
    )
    assert not any("value" in name or "critic" in name for line in lines for name in line)


def test_rows_that_are_compared_answer_one_prompt(inputs, world, tmp_path, monkeypatch):
    """Eight responses, two to a prompt: rows 0 and 4, 1 and 5, ... share a prompt, and no other two do."""
    seen = []
    monkeypatch.setattr(
        ppo,
        "generate",
        lambda policy, prompts, *a, **k: seen.append(prompts) or generate(policy, prompts, *a, **k),
    )
    alone = config(advantage="rloo", critic=None, responses_per_prompt=2, steps=1, evaluations=1)
    run(alone, inputs, world, tmp_path)
    asked = seen[0]
    assert asked[:4] == asked[4:]
    assert len({tuple(prompt) for prompt in asked}) == 4


def test_pooled_batches_are_one_large_batch(trained, inputs, world, tmp_path):
    pooled = run(config(rollout_batch_size=2, rollout_batches=4), inputs, world, tmp_path)
    after, expected = (
        module(pooled[0], "actor").state_dict(),
        module(trained[0], "actor").state_dict(),
    )
    assert all(torch.equal(after[key], value) for key, value in expected.items())
    assert pooled[0].actor.global_steps == trained[0].actor.global_steps == 2


def test_the_critic_can_train_alone_at_first(inputs, world, tmp_path):
    models, _, lines, _ = run(config(critic_warmup_steps=1, ppo_epochs=2), inputs, world, tmp_path)
    assert (models.actor.global_steps, models.critic.global_steps) == (2, 4)
    assert "value/loss" in lines[0] and not any(
        "policy" in name or "actor" in name for name in lines[0]
    )
    assert lines[1]["policy/loss"] != 0.0
    # The first step left the actor at the reference, so the second one's samples have no KL yet.
    assert lines[1]["objective/kl"] == pytest.approx(0.0, abs=1e-6)
    # Both cosines end with the last step, though the actor took half as many.
    assert lines[1]["optim/actor_lr"] == pytest.approx(0.0) and lines[1][
        "optim/critic_lr"
    ] == pytest.approx(0.0)


def test_an_update_stops_when_the_policy_has_moved_too_far(inputs, world, tmp_path):
    """In the first epoch the policy is still the one that sampled; in the second its KL is beyond any small bound."""
    stopped = config(ppo_epochs=4, kl={"stop_update": 1e-8})
    models, _, lines, _ = run(stopped, inputs, world, tmp_path)
    assert [line["policy/epochs"] for line in lines] == [2, 2]
    assert models.actor.global_steps == models.critic.global_steps == 2 * 2
    assert lines[-1]["optim/actor_lr"] == pytest.approx(
        0.0
    )  # the schedule ends with the last step all the same


def test_an_entropy_bonus_keeps_the_policy_undecided(trained, inputs, world, tmp_path):
    bonus = run(config(entropy_coef=10.0), inputs, world, tmp_path)[2]
    assert bonus[0]["policy/entropy"] == trained[2][0]["policy/entropy"]
    assert bonus[1]["policy/entropy"] > trained[2][1]["policy/entropy"] + 1e-4


def test_the_dual_clip_reaches_the_loss(inputs, world, tmp_path, monkeypatch):
    seen = []
    original = update.policy_loss
    monkeypatch.setattr(
        update, "policy_loss", lambda *a, **k: seen.append(k["dual_clip"]) or original(*a, **k)
    )
    run(config(dual_clip=3.0, steps=1, evaluations=1), inputs, world, tmp_path)
    assert set(seen) == {3.0}


def test_training_stops_beyond_the_kl_bound_and_exports_nothing_from_there(inputs, world, tmp_path):
    bound = config(
        steps=50, evaluations=50, kl={"coef": 0.0, "maximum": 0.05}, missing_eos_score=None
    )
    _, _, lines, best = run(bound, inputs, world, tmp_path)
    assert len(lines) < 50
    assert lines[-1]["objective/kl"] > 0.05
    assert all(line["objective/kl"] <= 0.05 for line in lines[:-1])
    assert best["validation"].best.metrics["validation/kl"] <= 0.05


def test_the_average_of_the_weights_is_a_policy_of_its_own(inputs, world, tmp_path):
    """A decay of almost 1 leaves the start's weights: no KL; of almost 0 the actor's. Keeping one changes no other number."""
    plain = run(config(), inputs, world, tmp_path / "plain")[2]
    for decay, same in ((1e-6, "last"), (1 - 1e-9, "start")):
        folder = tmp_path / same
        lines = run(config(ema={"decay": decay}), inputs, world, folder)[2]
        kept = load_policy(only_best(folder / "checkpoints" / "ema"), "fp32").state_dict()
        expected = inputs["sft_model"] if same == "start" else only_best(folder / "checkpoints")
        for name, value in load_policy(expected, "fp32").state_dict().items():
            torch.testing.assert_close(kept[name], value, rtol=1e-5, atol=1e-6)
        kl = [line["validation_ema/kl"] for line in lines]
        assert kl == pytest.approx(
            [0.0] * 2 if same == "start" else [line["validation/kl"] for line in lines], abs=1e-5
        )
        for line, other in zip(lines, plain, strict=True):
            assert {
                n: v for n, v in line.items() if not n.startswith(("time/", "validation_ema/"))
            } == {n: v for n, v in other.items() if not n.startswith("time/")}
    assert not any("ema" in name for line in plain for name in line)
    assert abs(plain[-1]["validation/kl"]) > 1e-3


def test_the_gold_score_is_shown_where_every_prompt_has_a_judge(
    trained, inputs, world, monkeypatch
):
    """A judge that likes prompt i by i: 3.5 over 0 to 7, and 1.5 over the first four. It hears the text alone."""
    models, _, lines, _ = trained
    assert not any("gold" in name for line in lines for name in line)
    heard = []
    monkeypatch.setitem(
        JUDGES, "files", lambda prompt, text: heard.append(text) or float(prompt[-1].content)
    )
    prompts = ppo.load_rows(inputs["prompts"] / "validation.arrow", world)

    def gold(table, **changes):
        return ppo.evaluate(models, table, config(**changes), world, 1).get("objective/gold_score")

    assert gold(prompts, sampling={"max_response_tokens": 60}) == pytest.approx(3.5)
    assert (
        len(heard) == 8 and len({len(text) for text in heard}) > 1
    )  # some end early, in EOS and padding
    assert not any(token in text for text in heard for token in ("<|pad|>", "<|end|>"))
    assert gold(prompts, evaluation_prompts=4) == pytest.approx(1.5)
    other = prompts.set_column(2, "source", pa.array(["files"] * 7 + ["other"]))
    assert gold(other) is None


@pytest.mark.parametrize("sign", [1, -1])
def test_the_gold_score_chooses_no_checkpoint(trained, inputs, world, tmp_path, monkeypatch, sign):
    """Whichever evaluation the judge likes better, the exported one is the same."""
    calls = iter(range(100))
    monkeypatch.setitem(JUDGES, "files", lambda prompt, text: sign * 1000.0 * next(calls))
    _, _, lines, best = run(config(), inputs, world, tmp_path)
    assert (lines[0]["validation/gold_score"] < lines[1]["validation/gold_score"]) == (sign > 0)
    best = best["validation"].best
    assert best.step == trained[3]["validation"].best.step
    assert best.merit == best.metrics["validation/score"]


def test_the_adaptive_coefficient_follows_the_kl(inputs, world, tmp_path):
    """KL starts at 0, so the error is clipped at -0.2: 0.1 * (1 - 0.2 * 8 / 16) = 0.09."""
    lines = run(config(kl={"coef": 0.1, "target": 6.0, "horizon": 16}), inputs, world, tmp_path)[2]
    assert [line["objective/kl_coef"] for line in lines] == pytest.approx([0.1, 0.09])


def test_a_loss_that_is_not_finite_ends_the_stage_at_once(inputs, world, tmp_path, monkeypatch):
    monkeypatch.setattr(
        update, "policy_loss", lambda logprobs, *a, **k: logprobs.sum() * float("nan")
    )
    with pytest.raises(StageError, match=r"policy/loss is nan at step 1: training has diverged"):
        run(config(evaluations=1, log_every=2), inputs, world, tmp_path)


def test_the_score_is_read_at_the_last_real_token(inputs, world):
    """The score of a response does not change when its neighbours in the batch are longer."""
    from rlhf_pipeline.models.forward import sequence_scores
    from rlhf_pipeline.models.sequences import collate

    model = load_scores(inputs["reward_model"], "fp32").eval()
    alone = sequence_scores(model, collate([[5, 6]], [[7, 1]], 0))
    padded = sequence_scores(model, collate([[5, 6], [5]], [[7, 1], list(np.arange(8, 28))], 0))
    torch.testing.assert_close(padded[0], alone[0], rtol=1e-5, atol=1e-5)


def test_a_reward_model_of_another_tokenizer_is_refused_before_anything_loads(inputs, tmp_path):
    import shutil

    other = tmp_path / "other"
    shutil.copytree(inputs["reward_model"], other)
    fields = json.loads((other / "token_contract.json").read_text()) | {
        "vocabulary_digest": "0" * 64
    }
    (other / "token_contract.json").write_text(json.dumps(fields))
    job = LaunchedJob(
        "ppo",
        "f",
        1,
        {"ppo": config().model_dump(mode="json")},
        inputs | {"reward_model": other},
        {},
        tmp_path,
        60.0,
    )
    with pytest.raises(ArtifactError, match=r"do not speak the same tokens: vocabulary_digest"):
        ppo.main(job)
