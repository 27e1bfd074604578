"""The registration of a candidate, one transaction: register both policies, count the attempt on
the test set, decide by the gate, move the aliases. A repeated registration changes nothing.

The SFT baseline and the candidates are versions of one registered model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.config.evaluate import (
    CHAMPION,
    JUDGE_MODEL,
    JUDGE_PREFIX,
    EvaluateConfig,
    Promote,
    RegisterConfig,
)
from rlhf_pipeline.config.rewards import PairwiseJudge
from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.errors import ArtifactError, StageError, without_secrets
from rlhf_pipeline.runtime.manifest import NAME, Manifest, content_digest, json_digest
from rlhf_pipeline.tracking import store
from rlhf_pipeline.verdict.answers import opponents, read_answers
from rlhf_pipeline.verdict.comparison import (
    BASELINE,
    FURTHER,
    baseline_of,
    deciding_judge,
    read_evaluation,
    read_standings,
    worst,
)
from rlhf_pipeline.verdict.gate import Evidence, Verdict, decide
from rlhf_pipeline.verdict.words import hardly_learned, summary, titles

if TYPE_CHECKING:
    from mlflow import MlflowClient

UPLOAD = "policy"  # folder of a run's artifacts with the policy, on a server
ATTEMPT_TAG = "rlhf.try."  # prefix of a tag with the number of an attempt, for each test set
_ENDS = ("_lower", "_upper")


@dataclass(frozen=True)
class Policy:
    """A finished policy and its metrics in the evaluation."""

    folder: Path  # the published artifact, which contains a manifest
    metrics: dict[str, float]  # `eval/...` to value
    description: str = ""  # that of the version in the registry


@dataclass(frozen=True)
class Registration:
    """The state of the registry after a registration, as JSON types.

    A stage is "sft" or "base_model", and that of the candidate.
    """

    model: str
    versions: dict[str, str]  # stage to version
    runs: dict[str, str]  # stage to the id of the run that trained the policy
    digests: dict[str, str]  # stage to the content digest of the policy
    aliases: dict[str, str]
    """Every alias of the model to its version; "champion" is missing before the first promotion."""
    promoted: bool  # whether the candidate is the champion
    verdict: dict[str, Any]
    """Every condition of the gate, see `rlhf_pipeline.verdict.gate.Verdict`."""

    def record(self) -> dict[str, Any]:
        """What is published, with a digest of the rest."""
        return asdict(self) | {"digest": json_digest(asdict(self))}


def read_registration(file: Path) -> dict[str, Any]:
    """A published registration. Raises ArtifactError if it was changed, or has no digest."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        if found.pop("digest") != json_digest(found):
            raise ValueError("its digest does not match")
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ArtifactError(
            f"{file} is of an earlier version, or was changed ({error}). Fix: restore the file; "
            f"if you have no copy, remove {file.parent}"
        ) from None
    return found


def register_evaluated(
    sft_model: Path,
    candidate_model: Path,
    evaluation: Path,
    champion: store.Champion | None,
    answered: Path | None,
    config: RegisterConfig,
    sources: Sequence[SourceConfig],
    project: Path,
) -> Registration:
    """Register the policies of an evaluation with its metrics, and apply the gate.

    The gate reads the answers of the evaluation and those of the present champion to the same
    prompts, in the evaluation `answered`. `sources` are those of the data. Raises StageError, see
    `register`.
    """
    compared = read_evaluation(evaluation)
    candidate, baseline = compared["candidate"], baseline_of(compared)
    rate = compared["win_rates"][compared["judge"]]
    title = titles(compared)[baseline].removeprefix("the ").capitalize() + " as"
    title = "SFT" if baseline == BASELINE else title
    # The run of the evaluation has the intervals; here they would hide the values.
    metrics = {
        policy: {f"eval/{name}": x for name, x in given.items() if not name.endswith(_ENDS)}
        for policy, given in compared["policies"].items()
    }
    metrics[candidate]["eval/win_rate"] = rate["rate"]
    metrics[candidate] |= {f"eval/win_rate{end}": rate[end[1:]] for end in _ENDS}
    evidence = _evidence(evaluation, champion, answered)
    data = ", ".join(source.label() for source in sources)
    about = f"{title} baseline. Data: {data}", f"{summary(compared)} Data: {data}"
    asked = {answer.source for answer in evidence.candidate}
    with store.request_limits(uploads=True):
        return register(
            store.connect(store.tracking_uri(project), project),
            sft=Policy(sft_model, metrics[baseline], about[0]),
            candidate=Policy(candidate_model, metrics[candidate], about[1]),
            test_set=", ".join(sorted(s.label() for s in sources if s.name in asked)),
            beaten=None if champion is None else champion.version,
            judged=lambda attempts: decide(replace(evidence, tries=attempts), config),
            promote=config.promote,
            model=config.model,
        )


def _evidence(evaluation: Path, champion: store.Champion | None, answered: Path | None) -> Evidence:
    """What the gate reads: the answers of an evaluation, and those of the present champion.

    Raises StageError if the champion answered under other conditions.
    """
    compared = read_evaluation(evaluation)
    answers, standings = read_answers(evaluation), read_standings(compared)
    baseline = baseline_of(compared)
    judges = EvaluateConfig.model_validate(Manifest.read(evaluation).config["evaluate"]).judges
    pairwise = {judge.label for judge in judges if isinstance(judge, PairwiseJudge)}
    drawn = answers[baseline] + answers.get(f"{baseline}{FURTHER}", [])
    evidence = Evidence(
        candidate=answers[compared["candidate"]],
        baseline=answers[baseline],
        met=opponents(answers[baseline], drawn) if compared["judge"] in pairwise else None,
        against=titles(compared)[baseline],
        judge=compared["judge"],
        standing=standings[compared["judge"]],
        champion_fault=None if champion is None else champion.fault,
        accuracy={
            judge: found
            for judge, found in compared["accuracy"].items()
            if judge == compared["judge"]
            or {"rewards", "earlier"} & {*standings[judge].by.values()}
        },
        tasks=compared.get("tasks", {}),
        hardly_learned=hardly_learned(compared.get("learned", {})),
    )
    if answered is not None:
        if conditions(answered) != conditions(evaluation):
            raise StageError(
                f"{answered}: the champion answered under other conditions than the candidate in "
                f"{evaluation}. Fix: `kedro run --from-nodes=evaluate` with one set of parameters"
            )
        others = read_standings(read_evaluation(answered))
        both = {judge: worst(own, others[judge]) for judge, own in standings.items()}
        evidence = replace(
            evidence, champion=read_answers(answered)[CHAMPION], champion_judge=deciding_judge(both)
        )
    return evidence


def conditions(evaluation: Path) -> dict[str, Any]:
    """What two evaluations must share, so that their answers can be compared prompt by prompt."""
    manifest = Manifest.read(evaluation)
    judging = JUDGE_PREFIX, "reward_model", f"{JUDGE_MODEL}."
    inputs = manifest.inputs.items()
    return {
        **{name: digest for name, digest in inputs if name.startswith(judging)},
        "prompts": sorted({digest for name, digest in inputs if name.endswith("prompts")}),
        "seed": manifest.seed,
        "evaluate": json.dumps(manifest.config["evaluate"], sort_keys=True),
    }


def register(
    client: MlflowClient,
    *,
    sft: Policy,
    candidate: Policy,
    test_set: str,
    judged: Callable[[int], Verdict],
    beaten: str | None = None,
    promote: Promote = "gate",
    model: str = "rlhf-policy",
) -> Registration:
    """Register both policies and move the aliases. A repeated call changes nothing.

    `sft-baseline` and `candidate` always move to the two versions; `champion` moves to the
    candidate as `promote` says. `judged` is the verdict of the gate at the k-th candidate for the
    test set with this name; it becomes a tag of the version, and that of a champion stays. `beaten`
    is the version of the champion that the verdict compared. The metrics are logged to the run that
    trained each policy, where MLflow's comparison of versions reads them.

    A version refers to the local folder of its policy, which a tracking server cannot read: it gets
    an upload. Raises StageError if the store fails, or has no training run of a policy.
    """
    from mlflow.exceptions import MlflowException

    try:
        try:
            client.create_registered_model(model)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        names = [Manifest.read(policy.folder).stage for policy in (sft, candidate)]
        names[1] = "candidate" if names[0] == names[1] else names[1]  # two imported models
        policies = dict(zip(names, (sft, candidate), strict=True))
        runs = {stage: _training_run(client, policy) for stage, policy in policies.items()}
        versions = {
            stage: _version(client, model, policy, runs[stage])
            for stage, policy in policies.items()
        }
        baseline, version = versions.values()
        present = _aliases(client, model).get(CHAMPION)
        tags = client.get_model_version(model, version).tags
        if present == version and store.VERDICT_TAG in tags:
            verdict = json.loads(tags[store.VERDICT_TAG])
        else:
            verdict = judged(count_attempt(client, model, version, test_set)).record()
            client.set_model_version_tag(model, version, store.VERDICT_TAG, json.dumps(verdict))
        moved = {"sft-baseline": baseline, "candidate": version}
        if {"never": False, "gate": not verdict["refusals"], "always": True}[promote]:
            _expect_beaten(client, model, present, beaten, version)
            moved[CHAMPION] = version
        for alias, number in moved.items():
            client.set_registered_model_alias(model, alias, number)
        aliases = _aliases(client, model)
    except MlflowException as error:
        address = without_secrets(client.tracking_uri)
        raise StageError(
            f"MLflow at {address} did not register {model}: {without_secrets(str(error))}. All "
            "policies are trained. Fix: when the store answers, repeat the `kedro run`; it reuses "
            "finished stages"
        ) from None  # the error itself can contain the store's password
    digests = {stage: content_digest(policy.folder) for stage, policy in policies.items()}
    promoted = aliases.get(CHAMPION) == version
    return Registration(model, versions, runs, digests, aliases, promoted, verdict)


def count_attempt(client: MlflowClient, model: str, version: str, test_set: str) -> int:
    """The number of a candidate among all that were tried on a test set; it keeps its number.

    The test set is the sources of its prompts: another seed, which selects other prompts of them,
    is one more chance for a policy that is no better. A candidate is known by its content, which
    has another version if the folder of the first one is gone.
    """
    tag = f"{ATTEMPT_TAG}{hashlib.sha256(test_set.encode()).hexdigest()[:16]}"
    digest = client.get_model_version(model, version).tags[store.DIGEST_TAG]
    found = client.search_model_versions(f"name = '{model}'")
    numbers = {
        each.tags[store.DIGEST_TAG]: int(each.tags[tag]) for each in found if tag in each.tags
    }
    number = numbers.get(digest, max(numbers.values(), default=0) + 1)
    client.set_model_version_tag(model, version, tag, str(number))
    return number


def _aliases(client: MlflowClient, model: str) -> dict[str, str]:
    aliases = client.get_registered_model(model).aliases
    return {alias: str(version) for alias, version in aliases.items()}


def _training_run(client: MlflowClient, policy: Policy) -> str:
    manifest = Manifest.read(policy.folder)
    run_id = store.find_run(client, manifest.fingerprint)
    if run_id is None:
        raise StageError(
            f"MLflow at {without_secrets(client.tracking_uri)} has no finished run of "
            f"{policy.folder} (stage {manifest.stage}, fingerprint {manifest.fingerprint[:16]}). "
            "Fix: repeat the `kedro run` from its first node; it reuses finished stages and sends "
            "their runs"
        )
    return run_id


def _version(client: MlflowClient, model: str, policy: Policy, run_id: str) -> str:
    """The version with exactly this content, created if missing; log and show its evaluation."""
    manifest, digest = Manifest.read(policy.folder), content_digest(policy.folder)
    same = {store.FINGERPRINT_TAG: manifest.fingerprint, store.DIGEST_TAG: digest}
    tagged = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in same.items())
    found = client.search_model_versions(f"name = '{model}' and {tagged}")
    server, source = store.is_server(client.tracking_uri), str(policy.folder.resolve())
    # A version whose local folder was deleted cannot be served.
    usable = [each for each in found if server or (Path(each.source) / NAME).is_file()]
    if usable:
        version = str(usable[0].version)
    else:
        if server:
            client.log_artifacts(run_id, source, UPLOAD)
            source = f"{client.get_run(run_id).info.artifact_uri}/{UPLOAD}"
        tags = same | {store.STAGE_TAG: manifest.stage}
        version = str(client.create_model_version(model, source, run_id, tags).version)
    metrics, logged = policy.metrics, client.get_run(run_id).data.metrics
    for name, value in metrics.items():
        if logged.get(name) != value:
            client.log_metric(run_id, name, value)
    shown = {}  # in the list of versions
    if "eval/win_rate" in metrics:
        rate, lower, upper = (metrics[f"eval/win_rate{end}"] for end in ("", *_ENDS))
        shown["win rate"] = f"{rate:.1%} (95%: {lower:.1%} to {upper:.1%})"
    if "eval/kl" in metrics:
        shown["KL"] = f"{metrics['eval/kl']:z.2f} nats"
    for tag, text in shown.items():
        client.set_model_version_tag(model, version, tag, text)
    client.update_model_version(model, version, policy.description)
    return version


def _expect_beaten(
    client: MlflowClient, model: str, present: str | None, beaten: str | None, version: str
) -> None:
    """Raise StageError if the present champion is neither beaten nor the candidate, by content."""
    if present is None or present in (beaten, version):
        return
    one, other = (client.get_model_version(model, each) for each in (present, version))
    if one.tags.get(store.DIGEST_TAG) != other.tags[store.DIGEST_TAG]:
        raise StageError(
            f"version {present} of {model} became the champion during this run, after version "
            f"{version} was compared with {f'version {beaten}' if beaten else 'none'}. Fix: "
            "repeat the `kedro run`; it reuses finished stages"
        )
