"""The registration of an evaluated candidate: what the registry and the gate get to see."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlhf_pipeline.config.evaluate import CHAMPION
from rlhf_pipeline.config.register import RegisterConfig
from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.evaluation.comparison import (
    BASELINE,
    deciding_judge,
    read_answers,
    read_evaluation,
)
from rlhf_pipeline.evaluation.gate import Evidence, decide
from rlhf_pipeline.evaluation.report import summary
from rlhf_pipeline.tracking.model_registry import Policy, Registration, register
from rlhf_pipeline.tracking.promotion import Champion, conditions
from rlhf_pipeline.tracking.store import connect, request_limits, tracking_uri


def register_evaluated(
    sft_model: Path,
    candidate_model: Path,
    evaluation: Path,
    champion: Champion | None,
    answered: Path | None,
    config: RegisterConfig,
    sources: Sequence[SourceConfig],
    project: Path,
) -> Registration:
    """Register the policies of an evaluation with its metrics, and apply the gate.

    The gate reads the answers of the evaluation and those of the present champion to the same
    prompts, in the evaluation `answered`. The other artifacts are published; `sources` are those of
    the data; `project` contains the tracking database, unless MLFLOW_TRACKING_URI is set.

    Raises StageError, see `register`, and ArtifactError if an earlier version made the evaluation.
    """
    compared = read_evaluation(evaluation)
    candidate, judge = compared["candidate"], compared["judge"]
    rate = compared["win_rates"][judge]
    # The run of the evaluation has the intervals; here they would hide the values.
    metrics = {
        policy: {
            f"eval/{name}": value
            for name, value in given.items()
            if not name.endswith(("_lower", "_upper"))
        }
        for policy, given in compared["policies"].items()
    }
    metrics[candidate] |= {
        f"eval/win_rate{suffix}": rate[key]
        for key, suffix in (("rate", ""), ("lower", "_lower"), ("upper", "_upper"))
    }
    evidence = _evidence(evaluation, champion, answered)
    data = ", ".join(source.label() for source in sources)
    asked = {answer.source for answer in evidence.candidate}
    with request_limits(uploads=True):
        return register(
            connect(tracking_uri(project), project),
            sft=Policy(sft_model, metrics[BASELINE], f"SFT baseline. Data: {data}"),
            candidate=Policy(
                candidate_model, metrics[candidate], f"{summary(compared)} Data: {data}"
            ),
            test_set=", ".join(sorted(s.label() for s in sources if s.name in asked)),
            beaten=None if champion is None else champion.version,
            judged=lambda tries: decide(replace(evidence, tries=tries), config),
            promote=config.promote,
            model=config.model,
        )


def _evidence(evaluation: Path, champion: Champion | None, answered: Path | None) -> Evidence:
    """What the gate reads: the answers of an evaluation, and those of the present champion.

    Raises StageError if the champion answered under other conditions.
    """
    compared = read_evaluation(evaluation)
    answers = read_answers(evaluation)
    evidence = Evidence(
        candidate=answers[compared["candidate"]],
        baseline=answers[BASELINE],
        judge=compared["judge"],
        independent=compared["independent"],
        champion_fault=None if champion is None else champion.fault,
        reward_model_accuracy=compared["reward_model_accuracy_lower"],
        tasks=compared.get("tasks", {}),
    )
    if answered is not None:
        if conditions(answered) != conditions(evaluation):
            raise StageError(
                f"{answered}: the champion answered under other conditions than the candidate in "
                f"{evaluation}. Fix: `kedro run --from-nodes=evaluate` with one set of parameters"
            )
        optimized = {*compared["optimized"], *read_evaluation(answered)["optimized"]}
        evidence = replace(
            evidence,
            champion=read_answers(answered)[CHAMPION],
            champion_judge=deciding_judge(compared["win_rates"], optimized),
        )
    return evidence
