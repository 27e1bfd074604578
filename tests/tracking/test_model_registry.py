"""Registration in a real MLflow database and through a real tracking server; the promotion gate."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rlhf_pipeline.config.register import RegisterConfig
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.manifest import Manifest, file_entries
from rlhf_pipeline.tracking.model_registry import (
    Policy,
    compare_path,
    gate,
    register,
    register_evaluated,
)
from rlhf_pipeline.tracking.store import experiment_id


def published(directory, stage, fingerprint, weights="weights"):
    """A policy's artifact."""
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_text(weights)
    Manifest(stage, fingerprint, 0, {}, {}, {}, {}, file_entries(directory)).write(directory)
    return directory


def training_run(client, fingerprint):
    """The id of a finished run of a recipe."""
    experiment = experiment_id(client)
    run = client.create_run(experiment, tags={"rlhf.fingerprint": fingerprint})
    client.set_terminated(run.info.run_id, "FINISHED")
    return run.info.run_id


@pytest.fixture
def sft(tmp_path):
    return Policy(published(tmp_path / "sft_model" / "v1", "sft", "aaaa"), {"eval/score": 1.0})


@pytest.fixture
def ppo(tmp_path):
    return Policy(
        published(tmp_path / "ppo_model" / "v1", "ppo", "bbbb"),
        {"eval/score": 2.0, "eval/kl": 0.5},
    )


@pytest.fixture
def trained(client):
    """Ids of the runs that trained the two policies."""
    return {"sft": training_run(client, "aaaa"), "ppo": training_run(client, "bbbb")}


def test_a_promoted_candidate(client, sft, ppo, trained):
    registration = register(client, sft=sft, candidate=ppo, refusals=[])
    assert json.loads(json.dumps(asdict(registration))) == {
        "model": "rlhf-policy",
        "versions": {"sft": "1", "ppo": "2"},
        "runs": trained,
        "aliases": {"sft-baseline": "1", "candidate": "2", "champion": "2"},
        "refusals": [],
        "compare": "/#/compare-model-versions?name=%22rlhf-policy%22&runs=%7B"
        f"%221%22%3A%22{trained['sft']}%22%2C%222%22%3A%22{trained['ppo']}%22%7D",
    }
    version = client.get_model_version("rlhf-policy", "2")
    assert version.source == str(ppo.folder)
    assert version.run_id == trained["ppo"]
    assert version.tags["rlhf.fingerprint"] == "bbbb"
    assert version.tags["rlhf.stage"] == "ppo"
    # printf '{"model.safetensors": "'$(printf weights | sha256sum | cut -c-64)'"}' | sha256sum
    assert (
        version.tags["rlhf.content_digest"]
        == "758bed0194f35c144d1db50511b7ea6e76f5a2f6e824057aa0f9bec2bf434003"
    )
    assert client.get_model_version_by_alias("rlhf-policy", "sft-baseline").source == str(
        sft.folder
    )
    assert client.get_run(trained["sft"]).data.metrics == {"eval/score": 1.0}
    assert client.get_run(trained["ppo"]).data.metrics == {"eval/score": 2.0, "eval/kl": 0.5}


def test_a_candidate_is_named_after_the_stage_that_trained_it(client, sft, tmp_path):
    dpo = Policy(published(tmp_path / "dpo_model" / "v1", "dpo", "dddd"), {"eval/score": 3.0})
    trained = {"sft": training_run(client, "aaaa"), "dpo": training_run(client, "dddd")}
    registration = register(client, sft=sft, candidate=dpo, refusals=[])
    assert registration.versions == {"sft": "1", "dpo": "2"}
    assert registration.runs == trained
    assert registration.aliases == {"sft-baseline": "1", "candidate": "2", "champion": "2"}
    assert client.get_model_version("rlhf-policy", "2").tags["rlhf.stage"] == "dpo"


def test_a_first_candidate_that_is_refused_is_not_the_champion(client, sft, ppo, trained):
    registration = register(client, sft=sft, candidate=ppo, refusals=["worse"])
    assert registration.aliases == {"sft-baseline": "1", "candidate": "2"}
    assert registration.refusals == ["worse"]


def test_a_refused_candidate_does_not_move_the_champion(client, sft, ppo, trained, tmp_path):
    register(client, sft=sft, candidate=ppo, refusals=[])
    training_run(client, "cccc")
    worse = Policy(published(tmp_path / "ppo_model" / "v2", "ppo", "cccc"), {})
    registration = register(client, sft=sft, candidate=worse, refusals=["worse"])
    assert registration.aliases == {"sft-baseline": "1", "candidate": "3", "champion": "2"}


def test_registering_again_changes_nothing(client, sft, ppo, trained, tmp_path):
    first = register(client, sft=sft, candidate=ppo, refusals=[])
    republished = shutil.copytree(
        ppo.folder, tmp_path / "ppo_model" / "v2"
    )  # another Kedro version, same bytes
    assert (
        register(client, sft=sft, candidate=replace(ppo, folder=republished), refusals=[]) == first
    )
    assert len(client.search_model_versions("name = 'rlhf-policy'")) == 2
    assert len(client.get_metric_history(trained["ppo"], "eval/score")) == 1


def test_a_version_whose_folder_was_deleted_is_not_reused(client, sft, ppo, trained, tmp_path):
    register(client, sft=sft, candidate=ppo, refusals=[])
    republished = shutil.move(ppo.folder, tmp_path / "ppo_model" / "v2")
    registration = register(
        client, sft=sft, candidate=replace(ppo, folder=republished), refusals=[]
    )
    assert registration.versions == {"sft": "1", "ppo": "3"}
    assert client.get_model_version_by_alias("rlhf-policy", "champion").source == str(republished)


def test_the_same_recipe_with_different_bytes_is_another_version(
    client, sft, ppo, trained, tmp_path
):
    register(client, sft=sft, candidate=ppo, refusals=[])
    other = published(tmp_path / "ppo_model" / "v2", "ppo", "bbbb", weights="other weights")
    registration = register(client, sft=sft, candidate=replace(ppo, folder=other), refusals=[])
    assert registration.versions == {"sft": "1", "ppo": "3"}


def test_a_changed_evaluation_replaces_the_metrics_of_the_run(client, sft, ppo, trained):
    register(client, sft=sft, candidate=ppo, refusals=[])
    register(
        client,
        sft=sft,
        candidate=replace(ppo, metrics={"eval/score": 3.0, "eval/kl": 0.5}),
        refusals=[],
    )
    assert client.get_run(trained["ppo"]).data.metrics == {"eval/score": 3.0, "eval/kl": 0.5}


def test_a_policy_without_a_training_run_is_refused(client, sft, ppo):
    training_run(client, "aaaa")
    with pytest.raises(
        StageError,
        match=r"no finished run of .*/ppo_model/v1 \(stage ppo, fingerprint bbbb\).*kedro",
    ):
        register(client, sft=sft, candidate=ppo, refusals=[])


def test_a_failure_of_the_store_names_the_store(client, sft, ppo):
    with pytest.raises(
        StageError, match=r"MLflow at sqlite:.* did not register a/b: .*repeat the `kedro run`"
    ):
        register(client, sft=sft, candidate=ppo, refusals=[], model="a/b")


def test_a_failing_store_is_named_without_its_password(sft, ppo, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    client = MlflowClient("http://me:canary@127.0.0.1:9")  # nothing listens on the discard port
    with pytest.raises(
        StageError, match=r"MLflow at http://\.\.\.@127\.0\.0\.1:9 did not register"
    ) as refusal:
        register(client, sft=sft, candidate=ppo, refusals=[])
    assert "canary" not in str(refusal.value) and refusal.value.__suppress_context__


@pytest.mark.slow
def test_a_server_gets_the_policy_once(served, sft, ppo, monkeypatch):
    from mlflow.artifacts import download_artifacts

    training_run(served, "aaaa")
    run_id = training_run(served, "bbbb")
    first = register(served, sft=sft, candidate=ppo, refusals=[])
    assert first.aliases == {"sft-baseline": "1", "candidate": "2", "champion": "2"}
    version = served.get_model_version("rlhf-policy", "2")
    assert version.source == f"mlflow-artifacts:/1/{run_id}/artifacts/policy"
    monkeypatch.setenv(
        "MLFLOW_TRACKING_URI", served.tracking_uri
    )  # as a user of the registry has it
    champion = download_artifacts("models:/rlhf-policy@champion")
    assert (Path(champion) / "model.safetensors").read_text() == "weights"
    assert register(served, sft=sft, candidate=ppo, refusals=[]) == first


CONFIG = RegisterConfig(min_win_rate_lower=0.5, max_kl=10.0)


@pytest.mark.parametrize(
    ("lower", "kl", "reasons"),
    [
        (0.51, 10.0, []),
        (
            0.5,  # as good as SFT
            0.0,
            [
                "win rate against SFT: found 0.500 as the lower end of its 95% interval, "
                "expected more than 0.5 (register.min_win_rate_lower)"
            ],
        ),
        (
            0.9,  # exploits the reward model
            11.625,
            ["KL from SFT: found 11.62 nats per response, expected at most 10 (register.max_kl)"],
        ),
        (
            float("nan"),
            float("nan"),
            [
                "win rate against SFT: found nan as the lower end of its 95% interval, "
                "expected more than 0.5 (register.min_win_rate_lower)",
                "KL from SFT: found nan nats per response, expected at most 10 (register.max_kl)",
            ],
        ),
    ],
)
def test_the_gate(lower, kl, reasons):
    assert gate({"eval/win_rate_lower": lower, "eval/kl": kl, "eval/score": 9.0}, CONFIG) == reasons


def test_the_gate_refuses_incomplete_metrics():
    with pytest.raises(
        ValueError, match=r"found metrics \['eval/kl'\], expected \['eval/win_rate_lower'\] too"
    ):
        gate({"eval/kl": 0.5}, CONFIG)


def evaluated(directory, **lower_ends):
    """A published evaluation, by the lower end of the win rate of each judge."""
    directory.mkdir()
    rates = {
        judge: {"rate": 0.75, "lower": lower, "upper": 1.0, "n": 40}
        for judge, lower in lower_ends.items()
    }
    policies = {"sft": {"score": 1.0, "kl": 0.0}, "ppo": {"score": 2.0, "kl": 0.5}}
    evaluation = {"candidate": "ppo", "policies": policies, "win_rates": rates}
    (directory / "evaluation.json").write_text(json.dumps(evaluation))
    Manifest("evaluate", "eeee", 0, {}, {}, {}, {}, file_entries(directory)).write(directory)
    return directory


@pytest.mark.parametrize(
    ("lower_ends", "read", "promoted"),
    [
        ({"score": 0.9, "gold": 0.25}, 0.25, False),
        ({"score": 0.25, "gold": 0.9}, 0.9, True),
        ({"score": 0.9}, 0.9, True),
        ({"score": 0.25, "words": 0.9}, 0.25, False),
    ],
)
def test_gold_decides_about_the_promotion_or_else_the_reward_model(
    client, sft, ppo, trained, tmp_path, monkeypatch, lower_ends, read, promoted
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", client.tracking_uri)
    evaluation = evaluated(tmp_path / "evaluation", **lower_ends)
    registration = register_evaluated(
        sft.folder, ppo.folder, evaluation, CONFIG, "synthetic", tmp_path
    )
    assert ("champion" in registration.aliases) == promoted == (not registration.refusals)
    version = client.get_model_version("rlhf-policy", registration.versions["ppo"])
    assert version.tags["win rate"] == f"75.0% (95%: {read:.1%} to 100.0%)"
    assert version.tags["KL"] == "0.50 nats"
    assert "it prefers PPO's answer to SFT's on 75.0%" in version.description
    assert version.description.endswith(" of 40 prompts. Data: synthetic") or (
        "prefers it on" in version.description
    )
    assert client.get_run(trained["ppo"]).data.metrics == {
        "eval/score": 2.0,
        "eval/kl": 0.5,
        "eval/win_rate": 0.75,
        "eval/win_rate_lower": read,
        "eval/win_rate_upper": 1.0,
    }
    assert client.get_run(trained["sft"]).data.metrics == {"eval/score": 1.0, "eval/kl": 0.0}


def test_a_model_name_survives_the_comparison_link():
    # MLflow's page decodes the query, parses JSON, and decodes the name again. Backwards for "a b":
    # encoded a%20b, as JSON "a%20b", encoded %22a%2520b%22
    assert compare_path("a b", {}) == "/#/compare-model-versions?name=%22a%2520b%22&runs=%7B%7D"
