"""MLflow's store, and that of stages. tests/commands/test_doctor.py asks a hub."""

import sqlite3

from rlhf_pipeline.diagnosis import services
from rlhf_pipeline.diagnosis.finding import run_checks
from rlhf_pipeline.storage.store import Store


def test_an_embedded_model_and_generated_data_need_no_network(setup):
    checks = [services.base_model, services.sources, services.judges]
    assert [found.found for found in run_checks(checks, setup())] == [
        "built from base_model.architecture",
        "none is remote",
        "none is remote",
    ]


def test_a_store_that_no_run_has_made_is_not_made_by_a_check(setup, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    assert services.tracking_store(setup()).found.endswith("mlflow.db, made by the first run")
    assert [*tmp_path.iterdir()] == []


def test_a_store_of_another_mlflow_is_a_failure(setup, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("CREATE TABLE alembic_version (version_num TEXT)")
        database.execute("INSERT INTO alembic_version VALUES ('of_the_future')")
        database.execute("CREATE TABLE experiments (experiment_id INTEGER)")
    (found,) = run_checks([services.tracking_store], setup())
    assert (found.check, found.state) == ("tracking store", "failure")
    assert "of_the_future" in found.found or "schema" in found.found


def test_a_server_that_does_not_answer_is_a_failure_without_its_password(setup, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:canary@127.0.0.1:9")
    (found,) = run_checks([services.tracking_store], setup())
    assert found.state == "failure"
    assert "canary" not in found.found
    assert found.fix == "start the server, or correct or unset MLFLOW_TRACKING_URI"


def test_a_store_is_written_to(setup, tmp_path):
    assert services.store(setup()).found == "none is configured"
    assert services.store(setup(store=Store(str(tmp_path / "store")))).found == f"{tmp_path}/store"
    (tmp_path / "file").touch()
    (found,) = run_checks([services.store], setup(store=Store(str(tmp_path / "file" / "below"))))
    assert (found.check, found.state) == ("store", "failure")
    assert found.fix.startswith("check path, permissions, credentials")
