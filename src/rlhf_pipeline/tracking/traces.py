"""The answers of an evaluation as traces, which MLflow's own evaluation pages read.

One run for each policy, a child of the evaluation's run. A trace is an answer to a prompt, and its
feedbacks are the judges' scores. `mlflow.genai.compare_evaluations` pairs the traces of two runs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_pipeline.tracking import store
from rlhf_pipeline.tracking.studies import PARENT_TAG
from rlhf_pipeline.verdict.answers import Answer

ANSWERS_TAG = "rlhf.answers"  # the fingerprint of the evaluation, and the policy
TYPE = {"mlflow.runType": "genai_evaluate"}
"""The tag of the runs that MLflow lists as evaluations."""


def log_answers(
    project: Path, fingerprint: str, answers: Mapping[str, Sequence[Answer]], judges: Sequence[str]
) -> dict[str, str]:
    """Log every answer of two policies, with scores of judges; return the run of each policy.

    A feedback `better/JUDGE` says whether the answer has the higher one of the two scores for its
    prompt, so McNemar's test of it is the sign test of an evaluation. Runs that a call has finished
    are kept. Raises StageError if the store fails.
    """
    import mlflow
    from mlflow.entities import AssessmentSource

    runs = {}
    with store.registry(project, "the answers", uploads=True) as client:
        mlflow.set_tracking_uri(store.tracking_uri(project))
        experiment, parent = store.experiment_id(client), store.find_run(client, fingerprint)
        for policy, given in answers.items():
            tag = f"{fingerprint}/{policy}"
            (other,) = answers.keys() - {policy}
            wanted = f"tags.`{ANSWERS_TAG}` = '{tag}' and status = 'FINISHED'"
            if known := client.search_runs([experiment], wanted, max_results=1):
                runs[policy] = known[0].info.run_id
                continue
            tags = {ANSWERS_TAG: tag} | TYPE | ({PARENT_TAG: parent} if parent else {})
            made = client.create_run(experiment, run_name=f"{policy}: answers", tags=tags)
            runs[policy] = made.info.run_id
            with mlflow.start_run(run_id=runs[policy]):
                for answer, against in zip(given, answers[other], strict=True):
                    with mlflow.start_span(policy) as span:
                        span.set_inputs({"prompt": answer.messages or answer.prompt})
                        span.set_outputs(answer.response)
                        pair = {"mlflow.eval.requestId": f"{answer.row}-{answer.draw}"}
                        mlflow.update_current_trace(tags=pair)
                        for judge in judges:
                            own, others = answer.scores[judge], against.scores[judge]
                            assert own is not None and others is not None, "judges are complete"
                            source = AssessmentSource("CODE", judge)
                            for name, value in ((judge, own), (f"better/{judge}", own > others)):
                                mlflow.log_feedback(
                                    trace_id=span.trace_id, name=name, value=value, source=source
                                )
                mlflow.flush_trace_async_logging()
    return runs
