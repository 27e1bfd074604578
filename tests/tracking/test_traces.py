"""The answers of an evaluation in MLflow's own evaluation pages, and its paired test of them."""

import shutil
from dataclasses import replace

import mlflow
import pytest
from made_by_hand import answer

from rlhf_pipeline.tracking import store
from rlhf_pipeline.tracking.traces import log_answers
from rlhf_pipeline.verdict.statistics import sign_test

ROWS = range(24, 40)
"""The gold judge prefers the baseline in six rows, PPO in nine, and none in one."""


@pytest.fixture(scope="module")
def logged(tmp_path_factory, empty_database):
    project = tmp_path_factory.mktemp("project")
    shutil.copy(empty_database, project / "mlflow.db")
    answers = {policy: [answer(row, policy) for row in ROWS] for policy in ("sft", "ppo")}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        runs = log_answers(project, "f" * 16, answers, ["gold", "score"])
        again = log_answers(project, "f" * 16, answers, ["gold", "score"])
        yield project, answers, runs, again
    mlflow.set_tracking_uri(None)


def traces_of(run):
    experiment = mlflow.get_run(run).info.experiment_id
    return mlflow.search_traces(locations=[experiment], run_id=run, return_type="list")


def feedback(trace):
    return {each.name: each.value for each in trace.info.assessments}


def test_each_answer_is_a_trace_with_the_scores_of_all_judges(logged):
    _, answers, runs, again = logged
    assert again == runs and len({*runs.values()}) == 2
    for policy, run in runs.items():
        traces = {each.info.tags["mlflow.eval.requestId"]: each for each in traces_of(run)}
        assert len(traces) == len(ROWS)
        for given in answers[policy]:
            (span,) = traces[f"{given.row}-0"].data.spans
            assert (span.inputs, span.outputs) == ({"prompt": given.prompt}, given.response)
            found = feedback(traces[f"{given.row}-0"])
            assert {name: found[name] for name in given.scores} == given.scores
        assert mlflow.get_run(run).data.tags["mlflow.runType"] == "genai_evaluate"


def test_the_discordant_pairs_are_those_of_the_sign_test(logged):
    _, _, runs, _ = logged
    better = {
        policy: sum(feedback(each)["better/gold"] for each in traces_of(run))
        for policy, run in runs.items()
    }
    assert better == {"sft": 6, "ppo": 9}


@pytest.mark.skipif(
    not hasattr(mlflow.genai, "compare_evaluations"), reason="MLflow compares runs from 3.18 on"
)
def test_the_paired_test_of_mlflow_agrees_with_the_sign_test(logged):
    _, answers, runs, _ = logged
    found = mlflow.genai.compare_evaluations(runs["ppo"], runs["sft"])
    better, gold = found.scorers["better/gold"], found.scorers["gold"]
    assert (better.method, better.n_paired) == ("mcnemar_exact", len(ROWS))
    assert better.p_value == pytest.approx(sign_test(9, 6), rel=1e-12)
    gains = [one.scores["gold"] - other.scores["gold"]
             for one, other in zip(answers["ppo"], answers["sft"], strict=True)]  # fmt: skip
    assert gold.diff == pytest.approx(sum(gains) / len(gains))
    assert (gold.ties, gold.n_nonzero) == (1, 15)


def test_a_run_that_a_kill_left_is_not_taken_for_a_finished_one(logged, monkeypatch):
    project, answers, runs, _ = logged
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.get_tracking_uri())
    with store.registry(project, "the test") as client:
        client.set_terminated(runs["ppo"], "KILLED")
    more = {policy: [replace(each) for each in given] for policy, given in answers.items()}
    again = log_answers(project, "f" * 16, more, ["gold", "score"])
    assert again["sft"] == runs["sft"] and again["ppo"] != runs["ppo"]
    assert len(traces_of(again["ppo"])) == len(ROWS)
