"""Registration in a real MLflow database and through a real tracking server; the promotion gate."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from made_by_hand import sealed
from random_answers import policy

from rlhf_pipeline.config.evaluate import EvaluateConfig, RegisterConfig
from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.pipelines.evaluate import register as register_node
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, file_entries
from rlhf_pipeline.tracking.mirror import MlflowTracker
from rlhf_pipeline.tracking.registration import (
    Policy,
    count_attempt,
    read_registration,
    register,
    register_evaluated,
)
from rlhf_pipeline.tracking.store import (
    Champion,
    experiment_id,
    find_version,
    local_folder,
    registered_folder,
)
from rlhf_pipeline.verdict.answers import Answer, write_answers
from rlhf_pipeline.verdict.comparison import Standing, compare
from rlhf_pipeline.verdict.gate import Check, Verdict
from rlhf_pipeline.verdict.statistics import win_rate


def refused(*reasons):
    """The arguments of a registration whose verdict has these refusals."""
    checks = tuple(Check(reason, "1", "2", None, False) for reason in reasons)
    verdict = Verdict("gold", "independent", 1, 0.95, checks)
    return {"test_set": "test", "judged": lambda tries: replace(verdict, tries=tries)}


PASSED = refused()


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
    folder = published(tmp_path / "ppo_model" / "v1", "ppo", "bbbb")
    return Policy(folder, {"eval/score": 2.0, "eval/kl": 0.5})


@pytest.fixture
def trained(client):
    """Ids of the runs that trained the two policies."""
    return {"sft": training_run(client, "aaaa"), "ppo": training_run(client, "bbbb")}


# printf '{"model.safetensors": "'$(printf weights | sha256sum | cut -c-64)'"}' | sha256sum
WEIGHTS = "758bed0194f35c144d1db50511b7ea6e76f5a2f6e824057aa0f9bec2bf434003"


def test_a_promoted_candidate(client, sft, ppo, trained):
    registration = register(client, sft=sft, candidate=ppo, **PASSED)
    assert json.loads(json.dumps(asdict(registration))) == {
        "model": "rlhf-policy",
        "versions": {"sft": "1", "ppo": "2"},
        "runs": trained,
        "digests": {"sft": WEIGHTS, "ppo": WEIGHTS},
        "aliases": {"sft-baseline": "1", "candidate": "2", "champion": "2"},
        "promoted": True,
        "verdict": {"judge": "gold", "state": "independent", "tries": 1, "confidence": 0.95,
                    "checks": [], "refusals": []},
    }  # fmt: skip
    version = client.get_model_version("rlhf-policy", "2")
    assert (version.source, version.run_id) == (str(ppo.folder), trained["ppo"])
    tags = {"fingerprint": "bbbb", "stage": "ppo", "content_digest": WEIGHTS}
    assert version.tags.items() >= {f"rlhf.{name}": tag for name, tag in tags.items()}.items()
    baseline = client.get_model_version_by_alias("rlhf-policy", "sft-baseline")
    assert baseline.source == str(sft.folder)
    assert client.get_run(trained["sft"]).data.metrics == {"eval/score": 1.0}
    assert client.get_run(trained["ppo"]).data.metrics == {"eval/score": 2.0, "eval/kl": 0.5}
    again = register(client, sft=sft, candidate=ppo, promote="never", **refused("stricter"))
    assert again == registration  # a champion keeps its verdict


def test_registering_again_changes_nothing_but_what_is_new(client, sft, ppo, trained, tmp_path):
    """A version whose folder was deleted is not reused."""
    first = register(client, sft=sft, candidate=ppo, **PASSED)
    again = shutil.copytree(ppo.folder, tmp_path / "ppo_model" / "v2")  # another Kedro version
    assert register(client, sft=sft, candidate=replace(ppo, folder=again), **PASSED) == first
    assert len(client.search_model_versions("name = 'rlhf-policy'")) == 2
    assert len(client.get_metric_history(trained["ppo"], "eval/score")) == 1
    better = replace(ppo, metrics={"eval/score": 3.0, "eval/kl": 0.5})
    assert register(client, sft=sft, candidate=better, **PASSED) == first
    assert client.get_run(trained["ppo"]).data.metrics == {"eval/score": 3.0, "eval/kl": 0.5}
    other = published(tmp_path / "ppo_model" / "v3", "ppo", "bbbb", weights="other weights")
    found = register(client, sft=sft, candidate=replace(ppo, folder=other), beaten="2", **PASSED)
    assert found.versions == {"sft": "1", "ppo": "3"}
    moved = shutil.move(other, tmp_path / "ppo_model" / "v4")
    found = register(client, sft=sft, candidate=replace(ppo, folder=moved), **PASSED)
    assert found.versions == {"sft": "1", "ppo": "4"}
    assert client.get_model_version_by_alias("rlhf-policy", "champion").source == str(moved)


def test_a_policy_without_a_training_run_is_refused(client, sft, ppo):
    training_run(client, "aaaa")
    message = r"no finished run of .*/ppo_model/v1 \(stage ppo, fingerprint bbbb\).*kedro"
    with pytest.raises(StageError, match=message):
        register(client, sft=sft, candidate=ppo, **PASSED)


def test_a_failing_store_is_named_without_its_password(sft, ppo, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    client = MlflowClient("http://me:canary@127.0.0.1:9")  # nothing listens on the discard port
    message = r"MLflow at http://\.\.\.@127\.0\.0\.1:9 did not register"
    with pytest.raises(StageError, match=message) as refusal:
        register(client, sft=sft, candidate=ppo, **PASSED)
    assert "canary" not in str(refusal.value) and refusal.value.__suppress_context__


@pytest.mark.slow
def test_a_server_gets_the_policy_once(serve, sft, ppo, tmp_path, monkeypatch):
    from mlflow.artifacts import download_artifacts

    served = serve("--artifacts-destination", str(tmp_path / "served"))
    training_run(served, "aaaa")
    run_id = training_run(served, "bbbb")
    first = register(served, sft=sft, candidate=ppo, **PASSED)
    assert first.aliases == {"sft-baseline": "1", "candidate": "2", "champion": "2"}
    version = served.get_model_version("rlhf-policy", "2")
    assert version.source == f"mlflow-artifacts:/1/{run_id}/artifacts/policy"
    folder = local_folder(served, version, tmp_path / "downloads")
    assert (folder / "model.safetensors").read_text() == "weights"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", served.tracking_uri)  # as a user has it
    champion = download_artifacts("models:/rlhf-policy@champion")
    assert (Path(champion) / "model.safetensors").read_text() == "weights"
    assert register(served, sft=sft, candidate=ppo, **PASSED) == first


@pytest.mark.long
def test_policies_and_pages_that_a_server_keeps_on_s3(bucket, serve, tmp_path, sft, ppo):
    client = serve("--no-serve-artifacts", "--default-artifact-root", "s3://bucket/mlflow")
    training_run(client, "aaaa")
    run = training_run(client, "bbbb")
    registration = register(client, sft=sft, candidate=ppo, **PASSED)
    version = find_version(client, "rlhf-policy", registration.versions["ppo"])
    assert version.source == f"s3://bucket/mlflow/1/{run}/artifacts/policy"
    folder = local_folder(client, version, tmp_path / "downloads")
    assert (folder / "model.safetensors").read_text() == "weights"
    tracker = MlflowTracker(client.tracking_uri, tmp_path, "full", {}, {})
    tracker.log_page("bbbb", "<p>page</p>")
    stored = bucket / "mlflow" / "1" / run / "artifacts"
    assert (stored / "evaluation.html").read_text() == "<p>page</p>"


@pytest.mark.parametrize(
    ("promote", "refusals", "champion"),
    [
        ("never", (), False),
        ("gate", (), True),
        ("gate", ("worse",), False),
        ("always", ("worse",), True),
    ],
)
def test_when_the_champion_moves(client, sft, ppo, trained, promote, refusals, champion):
    registration = register(client, sft=sft, candidate=ppo, promote=promote, **refused(*refusals))
    assert registration.promoted == champion == ("champion" in registration.aliases)
    version = client.get_model_version("rlhf-policy", "2")
    assert json.loads(version.tags["rlhf.verdict"]) == registration.verdict
    assert registration.verdict["refusals"] == [f"{name}: found 1, expected 2" for name in refusals]


def answers_of(quality, seed, kl=2.0):
    return policy(np.random.default_rng(seed), quality, kl=kl)


SFT = answers_of(0.0, 1, kl=0.0)
POLICIES = {"sft": SFT, "ppo": answers_of(0.9, 2)}
STANDINGS = dict.fromkeys(("gold", "chat"), Standing("independent"))


def evaluated(
    directory, policies=None, seed=0, config=None, further=(), how="rewards", over=None, **inputs
):
    """A published evaluation of answers, of a better candidate by default.

    `further` are second draws of the baseline, `how` the training has optimized the reward model,
    and `over` what that knows beyond length.
    """
    directory.mkdir(parents=True)
    config, policies = config or EvaluateConfig(), policies or POLICIES
    drawn = sorted([*policies["sft"], *further], key=lambda a: (a.row, a.draw))
    standings = STANDINGS | {"score": Standing("optimized", {"ppo": how})}
    evaluation = compare(policies, config, standings, drawn)
    evaluation["accuracy"] = {} if over is None else {"score": {"over_length": {"lower": over}}}
    (directory / "evaluation.json").write_text(json.dumps(evaluation))
    write_answers(policies | ({"sft_again": further} if further else {}), directory)
    blocks = {"evaluate": config.model_dump(mode="json")}
    inputs = {"prompts": "p" * 64, "reward_model": "r"} | inputs
    files = file_entries(directory)
    Manifest("evaluate", "eeee", seed, blocks, inputs, {}, {}, files).write(directory)
    return directory


@pytest.fixture
def decide(client, sft, ppo, trained, tmp_path):
    """Registers an evaluation of the two policies."""

    def decide(evaluation, champion=None, answered=None, folder=ppo.folder, data=("synthetic",),
               **config):  # fmt: skip
        gate, sources = RegisterConfig(**config), [SourceConfig(name=name) for name in data]
        return register_evaluated(
            sft.folder, folder, evaluation, champion, answered, gate, sources, tmp_path
        )

    return decide


def test_a_judge_of_pairs_is_held_to_the_lengths_of_the_pairs_that_it_saw(decide, tmp_path):
    """The judge prefers the longer answer of a pair, more often the longer it is, and the candidate
    writes longer answers. The baseline's answer in a pair is its second draw."""
    rng = np.random.default_rng(5)

    def answers(mean, draw=0):
        tokens = rng.lognormal(mean, 0.6, 400).round()
        texts = map(str, rng.integers(2**32, size=400))
        return [
            Answer(row, f"{row}?", text, {"chat": 0.0}, 0.0, -20.0, int(n) + 1, True, draw=draw)
            for row, (n, text) in enumerate(zip(tokens, texts, strict=True))
        ]

    baseline, further, longer = answers(3.0), answers(3.0, draw=1), answers(3.5)
    extra = [a.response_tokens - b.response_tokens for a, b in zip(longer, further, strict=True)]
    wins = rng.random(400) < 1 / (1 + np.exp(-2.5 * np.tanh(np.array(extra) / 15)))
    candidate = [
        replace(a, scores={"chat": 1.0 if won else -1.0})
        for a, won in zip(longer, wins, strict=True)
    ]
    chat = {"openai": {"base_url": "http://here/v1", "model": "m"}, "name": "chat"}
    policies = {"sft": baseline, "ppo": candidate}
    config = EvaluateConfig(judges=[chat])
    evaluation = evaluated(tmp_path / "e", policies, config=config, further=further)
    (refusal,) = decide(evaluation, max_length_ratio=9.0).verdict["refusals"]
    assert refusal.startswith("win rate against SFT at equal length: found 0.")


@pytest.mark.parametrize(("how", "refusals"), [("rewards", 1), ("earlier", 1), ("comparisons", 0)])
def test_a_reward_model_that_nothing_has_maximized_may_measure_length(
    decide, tmp_path, how, refusals
):
    """DPO learns from its comparisons, and another judge decides."""
    found = decide(evaluated(tmp_path / "e", how=how, over=-0.1)).verdict["refusals"]
    assert len(found) == refusals and all("above that of the longer answer" in one for one in found)


@pytest.mark.parametrize(("quality", "promoted"), [(0.9, True), (0.0, False)])
def test_the_gate_reads_the_answers(client, decide, trained, tmp_path, quality, promoted):
    policies = {"sft": SFT, "ppo": answers_of(quality, 2)}
    registration = decide(evaluated(tmp_path / "e", policies))
    assert registration.promoted == promoted == ("champion" in registration.aliases)
    verdict = registration.verdict
    assert (verdict["judge"], verdict["state"]) == ("gold", "independent")
    rate = win_rate(*([a.scores["gold"] for a in policies[name]] for name in ("ppo", "sft")))
    shown = f"{rate.rate:.1%} (95%: {rate.lower:.1%} to {rate.upper:.1%})"
    version = client.get_model_version("rlhf-policy", registration.versions["ppo"])
    assert version.tags["win rate"] == shown
    assert version.tags["KL"] == "2.00 nats"
    assert version.description.startswith("By the gold judge, ")
    assert "synthetic" in version.description
    logged = client.get_run(trained["ppo"]).data.metrics
    assert logged["eval/win_rate_lower"] == rate.lower
    assert "eval/score" in logged and "eval/score_lower" not in logged


@pytest.mark.parametrize(("quality", "promoted"), [(1.5, False), (0.0, True)])
def test_a_candidate_must_beat_the_present_champion_on_the_same_prompts(
    client, sft, ppo, trained, tmp_path, quality, promoted
):
    champion = published(tmp_path / "champion", "ppo", "ffff", weights="better")
    tags = {"rlhf.content_digest": content_digest(champion)}
    client.create_registered_model("rlhf-policy")
    version = client.create_model_version("rlhf-policy", source=str(champion), tags=tags).version
    client.set_registered_model_alias("rlhf-policy", "champion", version)
    evaluation = evaluated(tmp_path / "e", seed=7)
    answered = evaluated(tmp_path / "c", {"sft": SFT, "champion": answers_of(quality, 3)}, seed=7)
    jobs, split, reward_model = [], tmp_path / "split", tmp_path / "reward_model"
    registration = register_node(
        split, sft.folder, ppo.folder, reward_model, SimpleNamespace(), None,
        SimpleNamespace(sources=[]), evaluation, str(tmp_path), RegisterConfig(),
        EvaluateConfig(), 7, SimpleNamespace(run=lambda job: jobs.append(job) or answered),
        tmp_path,
    )  # fmt: skip
    (job,) = jobs
    assert job.spec.name == "evaluate_champion" and job.seed == 7
    assert job.inputs == {
        "prompts": split / "evaluation", "sft_rows": split / "sft", "sft_model": sft.folder,
        "champion_model": champion, "reward_model": reward_model,
    }  # fmt: skip
    assert [refusal.partition(":")[0] for refusal in registration["verdict"]["refusals"]] == [
        "paired win rate against the champion by the gold judge",
        "win rate against the champion at equal length",
    ] * (not promoted)
    aliases = registration["aliases"]
    assert aliases["champion"] == (aliases["candidate"] if promoted else str(version))


def test_another_seed_of_the_same_sources_is_one_more_try(client, decide, tmp_path):
    """Its split has other test prompts of the source; another source counts alone."""
    tries = []
    for number, (seed, name) in enumerate([(1, "a"), (2, "a"), (3, "b")]):
        folder = tmp_path / "candidates" / str(number)
        published(folder, "ppo", str(number), weights=str(number))
        training_run(client, str(number))
        given = {k: [replace(each, source=name) for each in v] for k, v in POLICIES.items()}
        evaluation = evaluated(tmp_path / f"e{number}", given, seed=seed, prompts=str(seed) * 64)
        found = decide(evaluation, folder=folder, data="ab", promote="never")
        tries.append(found.verdict["tries"])
    assert tries == [1, 2, 1]


def test_a_candidate_keeps_its_number_and_each_test_set_counts_alone(client):
    """Versions 1 and 5 have one content: the folder of the first one is gone."""
    client.create_registered_model("m")
    for digest in "abcda":
        client.create_model_version("m", "folder", tags={"rlhf.content_digest": digest})
    tried = [("1", "T"), ("2", "T"), ("3", "T"), ("2", "U"), ("3", "U"), ("4", "T"), ("1", "U")]
    assert [count_attempt(client, "m", *each) for each in tried] == [1, 2, 3, 1, 2, 4, 3]
    assert [count_attempt(client, "m", version, "T") for version in "25"] == [2, 1]


def test_two_runs_cannot_promote_past_each_other(client, sft, ppo, trained, tmp_path):
    """Both compared their candidate with no champion; one of them was faster."""
    register(client, sft=sft, candidate=ppo, **PASSED)
    training_run(client, "cccc")
    slower = Policy(published(tmp_path / "slower", "ppo", "cccc", weights="slower"), {})
    message = (
        "version 2 of rlhf-policy became the champion during this run, after version 3 was "
        "compared with none. Fix: repeat the `kedro run`"
    )
    with pytest.raises(StageError, match=message):
        register(client, sft=sft, candidate=slower, **PASSED)
    found = register(client, sft=sft, candidate=slower, beaten="2", **PASSED)
    assert found.aliases["champion"] == "3"


def test_the_gate_reads_the_tasks(client, decide, trained, tmp_path):
    evaluation = evaluated(tmp_path / "e")
    compared = json.loads((evaluation / "evaluation.json").read_text())
    copied = {"metric": "acc", "value": 0.5, "change": -0.25, "lower": -0.5, "upper": 0.0, "n": 8}
    compared["policies"]["ppo"] |= {"tasks/copy/acc": 0.5, "tasks/copy/acc_lower": 0.25}
    (evaluation / "evaluation.json").write_text(json.dumps(compared | {"tasks": {"copy": copied}}))
    sealed(evaluation)
    (refusal,) = decide(evaluation).verdict["refusals"]
    assert refusal.startswith("acc of task copy against SFT: found a change of -0.250")
    logged = client.get_run(trained["ppo"]).data.metrics
    assert logged["eval/tasks/copy/acc"] == 0.5 and "eval/tasks/copy/acc_lower" not in logged


@pytest.mark.parametrize("changes", [{"seed": 1}, {"prompts": "q" * 64}, {"reward_model": "s"}])
def test_answers_under_other_conditions_are_refused(decide, tmp_path, changes):
    answered = evaluated(tmp_path / "c", {"sft": SFT, "champion": POLICIES["ppo"]}, **changes)
    with pytest.raises(StageError, match="answered under other conditions than the candidate"):
        decide(evaluated(tmp_path / "e"), Champion("2", tmp_path), answered)


def test_without_a_champion_the_message_names_the_candidate(client, trained, sft, ppo, tmp_path):
    """champion is the default of `kedro rlhf chat`, and no name that the user has typed."""
    register(client, sft=sft, candidate=ppo, promote="never", **PASSED)
    with pytest.raises(ArtifactError) as refusal:
        registered_folder("champion", "rlhf-policy", tmp_path, tmp_path)
    assert refusal.value.message == (
        "found 'champion', expected a version or an alias of rlhf-policy, or the folder of an "
        "artifact. Fix: no policy has been promoted yet; write candidate, as in `kedro rlhf "
        "chat candidate` or `kedro rlhf export candidate FOLDER`"
    )
    for name, model, fix in (
        ("champ", "rlhf-policy", "`kedro rlhf ui` lists the versions"),
        ("champion", "other", "nothing is registered as other yet; `kedro run` trains"),
    ):
        with pytest.raises(ArtifactError, match=f"found '{name}', expected .* Fix: {fix}"):
            registered_folder(name, model, tmp_path, tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda text: text.replace("false", "true"), lambda text: "", lambda text: "[1]"]
)
def test_a_changed_registration_is_named(client, sft, ppo, trained, tmp_path, damage):
    made = register(client, sft=sft, candidate=ppo, promote="never", **PASSED)
    file = tmp_path / "v1" / "registration.json"
    file.parent.mkdir()
    file.write_text(json.dumps(made.record(), indent=2))
    assert read_registration(file) == asdict(made)
    file.write_text(damage(json.dumps(made.record())))
    message = rf"{file} is of an earlier version, or was changed .*Fix: restore .*{file.parent}"
    with pytest.raises(ArtifactError, match=message):
        read_registration(file)
