"""The model registry: SFT baseline and candidate policies as versions of one model, and who is the champion."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from rlhf_pipeline.config.register import RegisterConfig
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.redaction import without_secrets
from rlhf_pipeline.runtime.manifest import NAME, Manifest, content_digest, verify
from rlhf_pipeline.tracking.store import (
    FINGERPRINT_TAG,
    connect,
    find_run,
    is_server,
    patience,
    tracking_uri,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

DIGEST_TAG = "rlhf.content_digest"
UPLOAD = "policy"


@dataclass(frozen=True)
class Policy:
    """A finished policy and how it did in the evaluation."""

    checkpoint: Path
    """The published artifact; it holds a manifest."""
    metrics: dict[str, float]
    """`eval/...` to value."""


@dataclass(frozen=True)
class Registration:
    """What the registry holds after a registration; every field is JSON."""

    model: str
    versions: dict[str, str]
    """"sft" and the candidate's stage, "ppo" or "dpo", to version."""
    runs: dict[str, str]
    """"sft" and the candidate's stage to the id of the run that trained it."""
    aliases: dict[str, str]
    """All of the model's aliases to version; "champion" is absent until a candidate was promoted."""
    refusals: list[str]
    """Why the candidate was not promoted; empty: it is the champion."""
    compare: str
    """Path of the comparison of the two versions in MLflow's UI."""


def gate(metrics: dict[str, float], config: RegisterConfig) -> list[str]:
    """The reasons not to promote a candidate; empty: promote.

    Args:
        metrics: must hold "eval/win_rate_lower", the lower end of the 95% interval on the win rate against SFT, and
            "eval/kl" in nats per response. NaN does not pass.

    Raises:
        ValueError: one of the two is missing.
    """
    missing = [name for name in ("eval/win_rate_lower", "eval/kl") if name not in metrics]
    if missing:
        raise ValueError(
            f"the gate needs {' and '.join(missing)}; the metrics hold {sorted(metrics)}"
        )
    lower, kl = metrics["eval/win_rate_lower"], metrics["eval/kl"]
    reasons = []
    if not lower > config.min_win_rate_lower:
        reasons.append(
            f"win rate against SFT: the lower end of its 95% interval is {lower:.3f}, "
            f"and must be above {config.min_win_rate_lower:g} (min_win_rate_lower)"
        )
    if not kl <= config.max_kl:
        reasons.append(
            f"distance from SFT: the KL is {kl:.2f} nats per response, and must be at most {config.max_kl:g} (max_kl)"
        )
    return reasons


def register(
    client: MlflowClient,
    *,
    sft: Policy,
    candidate: Policy,
    refusals: list[str],
    model: str = "rlhf-policy",
) -> Registration:
    """Register both policies, by reference where the store is local, and move the aliases.

    `sft-baseline` and `candidate` always move to the two versions, `champion` to the candidate if `refusals`, the
    gate's reasons, are empty. The evaluation's metrics are logged to the run that trained each policy, which is where
    MLflow's version comparison looks. Registering the same policies again changes nothing.

    A tracking server cannot see local files, so there the checkpoints are uploaded to their runs first.

    Raises:
        StageError: a policy's training run is not in the store, or the store refuses.
    """
    from mlflow.exceptions import MlflowException

    try:
        _create_model(client, model)
        policies = {Manifest.read(policy.checkpoint).stage: policy for policy in (sft, candidate)}
        runs = {stage: _training_run(client, policy) for stage, policy in policies.items()}
        versions = {
            stage: _version(client, model, policy, runs[stage])
            for stage, policy in policies.items()
        }
        for stage, policy in policies.items():
            _log_evaluation(client, runs[stage], policy.metrics)
        baseline_version, candidate_version = versions.values()
        moved = {"sft-baseline": baseline_version, "candidate": candidate_version}
        moved |= {} if refusals else {"champion": candidate_version}
        for alias, version in moved.items():
            client.set_registered_model_alias(model, alias, version)
        aliases = {
            alias: str(version)
            for alias, version in client.get_registered_model(model).aliases.items()
        }
    except MlflowException as error:
        raise StageError(
            f"MLflow at {without_secrets(client.tracking_uri)} did not register {model}: {without_secrets(str(error))}; "
            "the checkpoints are finished; once it answers, repeat the `kedro run`: no finished stage is trained again"
        ) from None  # whose own words may name the store with its password
    compare = compare_path(model, {versions[stage]: runs[stage] for stage in policies})
    return Registration(model, versions, runs, aliases, list(refusals), compare)


def compare_path(model: str, runs: dict[str, str]) -> str:
    """Path of MLflow's side-by-side view of versions: its page takes the versions as JSON {version: run id}.

    Quotes and braces are percent-encoded, so that a terminal sees one link.
    """
    return f"/#/compare-model-versions?name={_query(quote(model, safe=''))}&runs={_query(runs)}"


def _query(value: str | dict[str, str]) -> str:
    return quote(json.dumps(value, separators=(",", ":")), safe="")


def _create_model(client: MlflowClient, model: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(model)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _training_run(client: MlflowClient, policy: Policy) -> str:
    manifest = Manifest.read(policy.checkpoint)
    run_id = find_run(client, manifest.fingerprint)
    if run_id is None:
        raise StageError(
            f"MLflow at {without_secrets(client.tracking_uri)} has no finished run of {policy.checkpoint} "
            f"(stage {manifest.stage}, fingerprint {manifest.fingerprint[:16]}); repeat the `kedro run` from its first node "
            "on: finished stages are not trained again, and the missing run is filled in from disk"
        )
    return run_id


def _version(client: MlflowClient, model: str, policy: Policy, run_id: str) -> str:
    """The version that holds this very content, created where there is none."""
    manifest, digest = Manifest.read(policy.checkpoint), content_digest(policy.checkpoint)
    same = (
        f"tags.`{FINGERPRINT_TAG}` = '{manifest.fingerprint}' and tags.`{DIGEST_TAG}` = '{digest}'"
    )
    server = is_server(client.tracking_uri)
    for found in client.search_model_versions(f"name = '{model}' and {same}"):
        if (
            server or (Path(found.source) / NAME).is_file()
        ):  # else its checkpoint was deleted: it can serve nobody
            return str(found.version)
    created = client.create_model_version(
        model,
        source=_upload(client, run_id, policy.checkpoint)
        if server
        else str(policy.checkpoint.resolve()),
        run_id=run_id,
        tags={
            FINGERPRINT_TAG: manifest.fingerprint,
            "rlhf.stage": manifest.stage,
            DIGEST_TAG: digest,
        },
    )
    return str(created.version)


def _upload(client: MlflowClient, run_id: str, checkpoint: Path) -> str:
    client.log_artifacts(run_id, str(checkpoint), UPLOAD)
    return f"{client.get_run(run_id).info.artifact_uri}/{UPLOAD}"


def _log_evaluation(client: MlflowClient, run_id: str, metrics: dict[str, float]) -> None:
    from mlflow.entities import Metric
    from mlflow.utils.time import get_current_time_millis

    logged = client.get_run(run_id).data.metrics
    now = get_current_time_millis()
    changed = [
        Metric(name, value, now, 0) for name, value in metrics.items() if logged.get(name) != value
    ]
    client.log_batch(run_id, metrics=changed)


def register_evaluated(
    sft_model: Path, candidate_model: Path, evaluation: Path, config: RegisterConfig, project: Path
) -> Registration:
    """Register the policies of an evaluation, with its metrics; the gate reads the gold win rate if there is one.

    Args:
        sft_model, candidate_model: published checkpoints.
        evaluation: the published comparison of the two.
        config: the registered model's name and the gate.
        project: where the tracking database lies, unless MLFLOW_TRACKING_URI names another store.

    Raises:
        ArtifactError: one of the three is not what its stage made.
    """
    for artifact in (sft_model, candidate_model, evaluation):
        verify(artifact)
    compared = json.loads((evaluation / "evaluation.json").read_text())
    candidate, rates = compared["candidate"], compared["win_rates"]
    measure = "gold" if "gold" in rates else "score"
    policies = {
        name: {f"eval/{key}": value for key, value in metrics.items()}
        for name, metrics in compared["policies"].items()
    }
    policies[candidate] |= {
        f"eval/win_rate{suffix}": rates[measure][key]
        for key, suffix in (("rate", ""), ("lower", "_lower"), ("upper", "_upper"))
    }
    with patience(uploads=True):
        return register(
            connect(tracking_uri(project), project),
            sft=Policy(sft_model, policies["sft"]),
            candidate=Policy(candidate_model, policies[candidate]),
            refusals=gate(policies[candidate], config),
            model=config.model,
        )
