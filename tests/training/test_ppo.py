"""The loop of PPO."""

import json
import shutil

import pytest
import torch
from ppo_runs import ppo_config, run_ppo
from transformers import GenerationMixin

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.zero import is_sharded
from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.generation.records import Rollout
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.metrics_file import read_json_lines
from rlhf_pipeline.training import ppo


class FixedGenerator:
    """Gives every prompt one of two responses, and records the calls.

    It claims a probability of 1 for every token.
    """

    def __init__(self, contract):
        self.contract = contract
        self.responses = ([20], [21, 22])  # without EOS
        self.calls = []

    def generate(self, prompts, sampling, seeds, prompt_numbers=None):
        self.calls.append((list(prompts), list(seeds), list(prompt_numbers)))
        responses = [
            [*self.responses[row % 2], self.contract.eos_id] for row in range(len(prompts))
        ]
        sequences = collate(prompts, responses, self.contract.pad_id)
        return Rollout(sequences, torch.zeros(sequences.response_ids.shape))


@pytest.fixture
def generator(ppo_inputs):
    return FixedGenerator(TokenContract.read(ppo_inputs["sft_model"]))


def test_the_first_values_have_the_mean_of_the_first_scores(generator, ppo_inputs, world, tmp_path):
    """Whatever the mean of the reward model's scalars within a response is."""
    generator.responses = ([20], [21])  # of equal length, so a mean over tokens is one over rows
    config = ppo_config(steps=1, evaluations=1, maximum_logprob_gap=None)
    run = run_ppo(config, ppo_inputs, world, tmp_path, generator=generator)
    line = run.lines[0]
    assert line["value/mean"] == pytest.approx(line["objective/shaped_score"], abs=1e-6)
    assert abs(run.setup.models.critic.module.offset) > 1e-3


def numbers(run, *but):
    """The metrics of each step without times, and without those that begin otherwise."""
    return [
        {name: value for name, value in line.items() if not name.startswith(("time/", *but))}
        for line in run.lines
    ]


def test_a_repeated_run_with_a_reference_in_main_memory_has_equal_metrics(trained, train_ppo):
    run = train_ppo(reference={"deepspeed": {"offload_parameters": True}})
    assert is_sharded(run.setup.models.reference)
    assert numbers(run) == numbers(trained)


def test_the_responses_come_from_the_generator(generator, train_ppo, monkeypatch):
    """With another generator, PPO trains without `generate` of transformers."""
    monkeypatch.setattr(
        GenerationMixin, "generate", lambda *_, **__: pytest.fail("transformers generates")
    )
    run = train_ppo(generator=generator, maximum_logprob_gap=None)
    assert [line["rollout/response_tokens"] for line in run.lines] == [2.5, 2.5]
    assert [line["validation/response_tokens"] for line in run.lines] == [2.5, 2.5]
    # It gets the seed, step and slot of each row. Training and evaluation take turns.
    first, held_out, second, held_out_again = (seeds for _, seeds, _ in generator.calls)
    assert first == [(1, 1, slot) for slot in range(8)]
    assert second == [(1, 2, slot) for slot in range(8)]
    assert held_out == held_out_again == [(1, ppo.HELD_OUT_STEP, slot) for slot in range(8)]


def test_responses_of_another_policy_end_training(generator, train_ppo):
    fault = r"rollout/logprob_gap: found \d+\.\d+ nats per token at step 1, expected at most ppo"
    with pytest.raises(StageError, match=fault + r"\.max"):
        train_ppo(generator=generator)


def test_rows_of_one_group_have_the_same_prompt(generator, train_ppo):
    """Eight responses, two per prompt: rows 0 and 4, 1 and 5, ... share a prompt."""
    train_ppo(
        generator=generator, maximum_logprob_gap=None, steps=1, evaluations=1,
        advantage="rloo", critic=None, responses_per_prompt=2,
    )  # fmt: skip
    prompts, _, numbers = generator.calls[0]
    assert prompts[:4] == prompts[4:] and numbers[:4] == numbers[4:]
    assert len({tuple(prompt) for prompt in prompts}) == len(set(numbers)) == 4


def test_without_a_critic_the_actor_trains_alone(train_ppo):
    run = train_ppo(
        advantage="rloo", critic=None, responses_per_prompt=2, rollout_batches=2,
        missing_eos_penalty=0.0,
    )  # fmt: skip
    models, before, after = run.setup.models, run.start["actor"], run.weights("actor")
    assert models.critic is None and models.actor.global_steps == 2 * 2
    assert not any(torch.equal(after[key], value) for key, value in before.items())
    assert not any("value" in name or "critic" in name for line in run.lines for name in line)


def test_the_critic_can_train_alone_at_first(train_ppo):
    run = train_ppo(critic_warmup_steps=1, ppo_epochs=2)
    models, (first, second) = run.setup.models, run.lines
    assert (models.actor.global_steps, models.critic.global_steps) == (2, 4)
    assert "value/loss" in first and not any("policy" in name or "actor" in name for name in first)
    assert second["policy/loss"] != 0.0
    # The actor still equals the reference when the second step samples from it.
    assert second["objective/kl"] == pytest.approx(0.0, abs=1e-6)
    # Both cosines end with the last step, although the actor took half as many.
    assert models.actor.get_lr() == models.critic.get_lr() == [pytest.approx(0.0)]


def test_training_stops_beyond_the_kl_bound_and_exports_no_later_model(train_ppo, tmp_path):
    slow = {"optimizer": {"learning_rate": 3e-4, "warmup_fraction": 0.0, "eps": 1e-4}}
    bound = {"coef": 0.0, "maximum": 0.05}
    run = train_ppo(steps=50, evaluations=50, kl=bound, missing_eos_penalty=0.0, actor=slow)
    assert len(run.lines) < 50
    assert run.lines[-1]["objective/kl"] > 0.05
    assert all(line["objective/kl"] <= 0.05 for line in run.lines[:-1])
    best = run.setup.best["validation"].best
    assert best.metrics["validation/kl"] <= 0.05
    *earlier, last = read_json_lines(tmp_path / "metrics.jsonl")
    assert last["note"] == (
        f"stopped after step {last['step']} of 50: KL {run.lines[-1]['objective/kl']:.2f} exceeds "
        f"ppo.kl.maximum 0.05; the best model within the limit, of step {best.step}, is exported"
    )
    assert not any("note" in record for record in earlier)


def test_each_evaluation_has_the_answers_to_the_same_prompts(generator, train_ppo, tmp_path):
    """Responses 20 and 21 22, in turns; the prompts are the first ones of the evaluation."""
    run = train_ppo(generator=generator, maximum_logprob_gap=None, answers=3)
    records = read_json_lines(tmp_path / "metrics.jsonl")
    (_, _, held_out), decode = generator.calls[1], run.setup.models.tokenizer.decode
    for step, record in enumerate(records, start=1):
        answers = record["answers"]
        assert [each["prompt"] for each in answers] == [f"User: {n}" for n in held_out[:3]]
        expected = [decode(ids).strip() for ids in ([20], [21, 22], [20])]
        assert [each["answer"] for each in answers] == expected
        assert {each["step"] for each in answers} == {step}
        assert [*answers[0]] == ["step", "prompt", "answer", "score", "kl"]
    first, second = ([each["kl"] for each in record["answers"]] for record in records)
    assert first != second  # the actor has moved


def test_training_without_an_evaluated_model_within_the_kl_bound_fails(train_ppo):
    """Training stops at the bound, before its only evaluation."""
    bound = {"coef": 0.0, "maximum": 0.05}
    run = train_ppo(steps=50, evaluations=1, kl=bound, missing_eos_penalty=0.0)
    assert run.setup.best["validation"].best is None
    expected = r"no evaluated actor was within 0\.05 nats .*Fix: .*ppo\.evaluations"
    with pytest.raises(StageError, match=expected):
        ppo.export(run.setup)


@pytest.mark.parametrize("decay", [1e-6, 1 - 1e-9])
def test_the_average_of_the_weights_is_evaluated_and_exported(
    trained, train_ppo, ppo_inputs, tmp_path, decay
):
    """A decay near 1 keeps the start's weights, one near 0 the actor's.

    Keeping an average changes no other number.
    """
    run = train_ppo(ema={"decay": decay})
    keeps_start = decay > 0.5
    (best,) = (tmp_path / "checkpoints").glob("best-*")
    (average,) = (tmp_path / "checkpoints" / "ema").glob("best-*")
    expected = load_policy(ppo_inputs["sft_model"] if keeps_start else best, "fp32").state_dict()
    kept = load_policy(average, "fp32").state_dict()
    torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-6)
    kl = [0.0, 0.0] if keeps_start else [line["validation/kl"] for line in run.lines]
    assert [line["validation_ema/kl"] for line in run.lines] == pytest.approx(kl, abs=1e-5)
    assert numbers(run, "validation_ema/") == numbers(trained)
    assert abs(trained.lines[-1]["validation/kl"]) > 1e-3


def test_the_adaptive_coefficient_follows_the_kl(train_ppo):
    """KL starts at 0, so the error is clipped at -0.2: 0.1 * (1 - 0.2 * 8 / 16) = 0.09."""
    lines = train_ppo(kl={"coef": 0.1, "target": 6.0, "horizon": 16}).lines
    assert [line["objective/kl_coef"] for line in lines] == pytest.approx([0.1, 0.09])


def test_a_reward_model_with_another_tokenizer_fails_before_anything_loads(ppo_inputs, tmp_path):
    other = shutil.copytree(ppo_inputs["reward_model"], tmp_path / "other")
    contract = json.loads((other / "token_contract.json").read_text())
    changed = json.dumps(contract | {"vocabulary_digest": "0" * 64})
    (other / "token_contract.json").write_text(changed)
    blocks = {"ppo": ppo_config().model_dump(mode="json")}
    inputs = ppo_inputs | {"reward_model": other}
    job = LaunchedJob("ppo", "f", 1, blocks, inputs, {}, tmp_path, 60.0)
    with pytest.raises(ArtifactError, match="use different tokenizers: vocabulary_digest"):
        ppo.main(job)
