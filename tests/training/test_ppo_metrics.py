"""Metrics of rollouts: the gold score, and one metric for each source of rewards."""

from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from ppo_runs import ppo_config

from rlhf_pipeline.data.sources.synthetic import GOLD_SCORES
from rlhf_pipeline.distributed.batches import sampled_rows
from rlhf_pipeline.generation.records import Scored
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.training import ppo
from rlhf_pipeline.training.ppo_metrics import sampled_answers


def test_the_metrics_of_a_rollout_by_hand(world):
    """Log ratios 1 and 2 of the first row, 3 of the second: a KL of 6 by the estimator k1.

    The weights 2, 1 and 1/2 of the three tokens have the effective size 3.5^2 / (3 * 5.25).
    """
    logprobs = torch.tensor([[1.0, 2.0], [3.0, float("nan")]])
    scored = Scored(
        collate([[5], [6]], [[20, 1], [21, 22]], 0, actions=[[True, True], [True, False]]),
        logprobs, torch.zeros(2, 2), torch.tensor([[1.0, 2.0], [4.0, float("nan")]]),
        torch.tensor([0.5, 1.5]), torch.tensor([True, False]), {"own": torch.tensor([1.0, 2.0])},
        torch.tensor([0.5, 1.0]),
        sampler_logprobs=logprobs - torch.tensor([[2.0, 1.0], [0.5, 4.0]]).log(),
    )  # fmt: skip
    config = ppo_config(missing_eos_penalty=0.5, sampler_correction={"maximum": 3.0})
    found = ppo.rollout_metrics(scored, config, world)
    k3 = float(sum(torch.tensor([-1.0, -2, -3]).expm1()) + 6)
    assert found == pytest.approx(
        {
            "objective/score": 1.0, "objective/shaped_score": 0.5,
            "objective/clipped_fraction": 0.5, "objective/kl": 3.0, "objective/kl_k3": k3 / 2,
            "objective/rlhf_reward": 0.5 - 0.1 * 3.0, "rollout/response_tokens": 1.5,
            "rollout/eos_fraction": 0.5, "reward/own": 1.5, "value/mean": 7 / 3,
            "rollout/effective_sample_size": 3.5**2 / (3 * 5.25),
        }
    )  # fmt: skip


def test_the_gold_score_is_a_metric_if_it_is_known_for_every_prompt(trained, monkeypatch):
    """Prompt i has gold score i: the mean is 3.5 over 0 to 7, and 1.5 over the first four."""
    assert not any("gold" in name for line in trained.lines for name in line)
    texts = []

    def gold_score(prompt, text):
        texts.append(text)
        return float(prompt[-1]["content"])

    monkeypatch.setitem(GOLD_SCORES, "files", gold_score)
    setup = trained.setup

    def gold(validation, **changes):
        changed = replace(setup, validation=validation, config=ppo_config(**changes))
        return ppo.held_out(changed)[0].get("objective/gold_score")

    prompts = setup.validation
    assert gold(prompts, sampling={"max_response_tokens": 60}) == pytest.approx(3.5)
    # Some responses end early with EOS and padding.
    assert len(texts) == 8 and len({len(text) for text in texts}) > 1
    assert not any(token in text for text in texts for token in ("<|pad|>", "<|end|>"))
    sample = sampled_rows(8, 4, setup.seed)
    assert sample.tolist() != [0, 1, 2, 3]
    assert gold(prompts, evaluation_prompts=4) == pytest.approx(sample.mean())
    (batch,) = prompts.batches
    sources = pa.array(["files"] * 7 + ["other"])
    assert gold(replace(prompts, batches=[batch.set_column(2, "source", sources)])) is None


def test_accuracy_is_a_metric_if_every_prompt_has_a_true_answer(trained, monkeypatch):
    """Of the first 3 prompts the true answer is the response, of 2 others a part of it."""
    setup, said = trained.setup, {}
    monkeypatch.setitem(GOLD_SCORES, "files", lambda prompt, text: said.setdefault(
        int(prompt[-1]["content"]), text) and 0.0)  # fmt: skip
    config = ppo_config(sampling={"max_response_tokens": 60})
    ppo.held_out(replace(setup, config=config))
    texts = [said[n] for n in range(8)]
    assert all(len(text.split()) > 1 for text in texts[3:5])
    true = [*texts[:3], *(text.split()[0] for text in texts[3:5]), *["no such answer"] * 3]

    def accuracies(references):
        (batch,) = setup.validation.batches
        batch = batch.append_column("reference", pa.array(references, pa.string()))
        validation = replace(setup.validation, batches=[batch])
        found, _ = ppo.held_out(replace(setup, config=config, validation=validation))
        return {name: value for name, value in found.items() if "accuracy" in name}

    assert accuracies(true) == {"objective/accuracy": 3 / 8, "objective/accuracy_lenient": 5 / 8}
    assert accuracies([*true[:7], None]) == {}


@pytest.mark.parametrize("sign", [1, -1])
def test_the_gold_score_does_not_choose_the_exported_model(trained, train_ppo, monkeypatch, sign):
    calls = iter(range(100))
    monkeypatch.setitem(GOLD_SCORES, "files", lambda *_: sign * 1000.0 * next(calls))
    run = train_ppo()
    first, second = (line["validation/gold_score"] for line in run.lines)
    assert (first < second) == (sign > 0)
    best = run.setup.best["validation"].best
    assert best.step == trained.setup.best["validation"].best.step
    assert best.selection_score == best.metrics["validation/rlhf_reward"]


@pytest.fixture
def with_function(ppo_inputs, tmp_path):
    """A function that returns 3, and the job's inputs with it."""
    function = tmp_path / "my.py"
    function.write_text("def three(prompts, responses): return [3.0] * len(responses)")
    return f"{function}:three", ppo_inputs | {"rewards.0": function, "rewards.1": function}


def test_each_source_of_several_has_a_metric(with_function, train_ppo):
    function, inputs = with_function
    one_step = {"steps": 1, "evaluations": 1}
    (alone,) = train_ppo("alone", **one_step).lines
    assert not any(name.startswith("reward/") for name in alone)
    rewards = ["trained", {"callable": function, "weight": 0.5}]
    (line,) = train_ppo("both", inputs=inputs, rewards=rewards, **one_step).lines
    assert line["reward/trained"] == pytest.approx(alone["objective/score"], abs=1e-6)
    assert line["reward/three"] == line["validation/reward/three"] == 3.0
    assert line["objective/score"] == pytest.approx(alone["objective/score"] + 1.5, abs=1e-5)
    held_out = line["validation/reward/trained"]
    assert line["validation/score"] == pytest.approx(held_out + 1.5, abs=1e-5)


def test_groups_of_equal_scores_are_counted(with_function, train_ppo):
    """Rows i and i + 4 answer the same prompt: 0 and 0, 1 and 1, 0 and 1, 1 and 0."""
    function, inputs = with_function
    by_row = "def three(prompts, responses): return [0, 1, 0, 1, 0, 1, 1, 0]"
    inputs["rewards.0"].write_text(by_row)
    (line,) = train_ppo(
        inputs=inputs, steps=1, evaluations=1, rewards=[function], missing_eos_penalty=0.0,
        advantage="grpo", critic=None, responses_per_prompt=2,
    ).lines  # fmt: skip
    assert line["rollout/equal_groups"] == 0.5
    assert not any(name.startswith("validation") and "equal" in name for name in line)


def test_the_best_model_is_chosen_by_what_ppo_maximizes(train_ppo):
    """The clipped score, less the penalty of cut responses and `kl.coef` times the KL."""
    run = train_ppo(
        steps=3, evaluations=3, score_clip=0.25, missing_eos_penalty=7.0,
        sampling={"max_response_tokens": 110}, kl={"coef": 2.0, "target": 1.0, "horizon": 100},
    )  # fmt: skip
    for line in run.lines:
        ended = line["validation/eos_fraction"]
        assert 0 < ended < 1
        shaped, reward = line["validation/shaped_score"], line["validation/rlhf_reward"]
        assert -7 * (1 - ended) - 0.25 <= shaped <= -7 * (1 - ended) + 0.25
        assert reward == pytest.approx(shaped - 2.0 * line["validation/kl"], abs=1e-6)
    assert run.lines[-1]["objective/kl_coef"] != 2.0
    best = run.setup.best["validation"].best
    assert best.selection_score == max(line["validation/rlhf_reward"] for line in run.lines)


def test_the_answers_of_all_ranks_are_in_the_order_of_the_prompts(trained, on_threads):
    """Two ranks with the prompts 0, 2, 4 and 1, 3, 5; with two sources, each has its score."""

    def of_rank(world):
        numbers = [world.rank, world.rank + 2, world.rank + 4]
        values = torch.tensor(numbers).float()
        scored = Scored(
            collate([[5]] * 3, [[20 + n] for n in numbers], 0), torch.zeros(3, 1),
            torch.zeros(3, 1), None, values, torch.ones(3).bool(), {"a": values, "b": -values},
        )  # fmt: skip
        rows = {"messages": [[{"role": "user", "content": str(n)}] for n in numbers]}
        return sampled_answers(rows, scored, replace(trained.setup, world=world), 5)

    first, second = on_threads(2, of_rank)
    assert first == second
    decode = trained.setup.models.tokenizer.decode
    assert first == [
        {"prompt": f"User: {n}", "answer": decode([20 + n]).strip(), "score": float(n),
         "reward/a": float(n), "reward/b": float(-n), "kl": 0.0}
        for n in range(5)
    ]  # fmt: skip
