"""The loss of KTO and its KL, in any batch and on any number of ranks."""

import copy

import numpy as np
import pyarrow as pa
import pytest
import torch
from rank_fixtures import write_table
from training.by_hand import metrics_of_micro_batches, supervised_setup, token_logprobs

from rlhf_pipeline.config.preferences import KTOConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.models.loading import freeze, load_policy
from rlhf_pipeline.training.kto import KTOTask, read_answers

ROWS = {
    "prompt_ids": [[5, 6, 7, 8, 9], [10], [11, 12], [13, 14, 15], [16]],
    "response_ids": [[20, 1], [21, 22, 23, 24, 1], [1], [25, 26, 1], [27, 1]],
    "label": [True, False, False, True, True],
}
OTHERS = [3, 0, 1, 4, 2]
"""The rows before 0 to 4 in numpy's permutation 2 4 3 0 1 of seed 0."""
CONFIG = KTOConfig.model_construct(
    beta=0.5, desirable_weight=2.0, undesirable_weight=1.0, batch_size=4, micro_batch_tokens=16
)


@pytest.fixture(scope="module")
def task(make_model):
    start = make_model("llama", seed=1)
    return KTOTask(TokenContract.read(start), freeze(load_policy(start, "fp32")), CONFIG)


@pytest.fixture
def model(make_model):
    """A policy with the same tokens as the reference and other weights."""
    return load_policy(make_model("llama", seed=2), "fp32")


def ratio_by_hand(model, reference, prompt, answer):
    """Sum of the log ratios of the answer's tokens, without padding."""
    row = ROWS["prompt_ids"][prompt], ROWS["response_ids"][answer]
    return (token_logprobs(model, *row) - token_logprobs(reference, *row)).sum()


def loss_by_hand(model, reference, kl):
    total = 0.0
    for row, label in enumerate(ROWS["label"]):
        above = CONFIG.beta * (ratio_by_hand(model, reference, row, row) - kl)
        total = total + (2 * (1 - above.sigmoid()) if label else above.sigmoid())
    return total / 5


def at_step(task, model, world, tokens=16):
    config = CONFIG.model_copy(update={"micro_batch_tokens": tokens})
    setup = supervised_setup(model, task, config, ROWS, world)
    return task.at_step(setup, setup.training, np.arange(5))


def of_all_rows(task, model):
    """The loss of all rows in one batch, and the metrics."""
    batch = task.collate(ROWS)
    loss, sums = task.loss(model, batch, task.weight(batch))
    return loss.item(), task.metrics({name: value.item() for name, value in sums.items()})


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 1000])
def test_the_kl_is_that_of_rows_with_the_answers_of_others(task, model, on_threads, ranks, tokens):
    """Of five rows, row i meets the answer of row OTHERS[i]; no rank has the same number of rows.

    Policy and reference are exchanged if the mean is not negative, which it may be.
    """
    freeze(model)
    mean = sum(ratio_by_hand(model, task.reference, row, OTHERS[row]) for row in range(5)) / 5
    policy, reference = (model, task.reference) if mean < 0 else (task.reference, model)

    def kl(world):
        trained, frozen = copy.deepcopy((policy, reference))  # a thread has its own models
        return at_step(KTOTask(task.contract, frozen, CONFIG), trained, world, tokens).kl.item()

    assert on_threads(ranks, kl) == pytest.approx([-abs(mean.item())] * ranks, rel=1e-4)


@pytest.mark.parametrize("tokens", [1, 16, 1000])
def test_micro_batches_do_not_change_loss_gradient_and_metrics(task, model, tokens):
    kl = torch.tensor(0.7)
    own = KTOTask(task.contract, task.reference, CONFIG, kl)
    assert own.weight(own.collate(ROWS)).item() == 5
    expected = loss_by_hand(model, task.reference, kl)
    metrics = metrics_of_micro_batches(own, model, ROWS, tokens, expected)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["kl"] == pytest.approx(0.7)
    good = sum(ratio_by_hand(model, task.reference, row, row).item() for row in (0, 3, 4)) / 3
    assert metrics["good_reward"] == pytest.approx(0.5 * good, rel=1e-3)


def test_a_negative_mean_counts_as_0_and_is_logged_as_it_is(task, model):
    found = {}
    for kl in (-0.7, 0.0):
        own = KTOTask(task.contract, task.reference, CONFIG, torch.tensor(kl))
        loss, found[kl] = of_all_rows(own, model)
        assert loss == pytest.approx(found[kl]["loss"])
    assert found[-0.7] == pytest.approx(found[0.0] | {"kl": -0.7})


def test_without_the_kl_nothing_is_computed_for_it(task, model):
    """There is no engine for a pass."""
    config = CONFIG.model_copy(update={"kl": "none"})
    own = KTOTask(task.contract, task.reference, config)
    assert own.at_step(None, None, np.arange(5)) is own
    loss, metrics = of_all_rows(own, model)
    assert loss == pytest.approx(loss_by_hand(model, task.reference, 0.0).item())
    assert "kl" not in metrics


def test_a_policy_equal_to_the_reference_is_at_the_kl(task, on_threads):
    """Every value is 1/2: (3 * 2 / 2 + 2 / 2) / 5, and every answer is on neither side."""
    (own,) = on_threads(1, lambda world: at_step(task, task.reference, world))
    loss, metrics = of_all_rows(own, task.reference)
    assert loss == pytest.approx(0.8)
    assert metrics == pytest.approx(
        {"loss": 0.8, "kl": 0.0, "agreement": 0.5, "good_reward": 0.0, "bad_reward": 0.0}
    )


def test_metrics_of_a_step_without_bad_answers():
    sums = {"answers": 2.0, "loss": 1.0, "kl": 0.4, "agreement": 1.5, "good": 2.0,
            "good_reward": 3.0, "bad_reward": 0.0}  # fmt: skip
    assert KTOTask(None, None, CONFIG).metrics(sums) == {
        "loss": 0.5, "kl": 0.2, "agreement": 0.75, "good_reward": 1.5,
    }  # fmt: skip


def test_a_comparison_is_one_good_and_one_bad_answer(task, tmp_path):
    """Labelled answers follow."""
    pairs = {
        "prompt_ids": [[10], [11], [12], [13]],
        "chosen_ids": [[20], [21], [22], [23]],
        "rejected_ids": [[30], [31], [32], [33]],
    }
    labelled = {"id": ["a"], "prompt_ids": [[50]], "response_ids": [[51]], "label": [False]}
    for name, columns in (("comparisons", pairs), ("labelled", labelled)):
        write_table(pa.table(columns), tmp_path / name, task.contract)
    found = read_answers(tmp_path / "comparisons" / "train.arrow", tmp_path / "labelled")
    rows = found.columns(np.arange(found.num_rows))
    assert rows["prompt_ids"] == [[10], [11], [12], [13]] * 2 + [[50]]
    assert [ids for (ids,) in rows["response_ids"]] == [20, 21, 22, 23, 30, 31, 32, 33, 51]
    assert rows["label"] == [True] * 4 + [False] * 5
