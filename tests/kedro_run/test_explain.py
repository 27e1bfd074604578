"""Errors of libraries, explained in one message."""

import errno
import re
from pathlib import Path

import pytest
from kedro.io.core import DatasetError

from rlhf_pipeline.errors import Interrupted, PipelineError, StageError
from rlhf_pipeline.kedro_run.explain import explain, explained_errors


def test_an_explained_error_is_found_below_the_errors_that_wrap_it():
    error = StageError("the disk is full")
    wrapped = DatasetError("sft_model: ...")
    wrapped.__cause__ = DatasetError("...")
    wrapped.__cause__.__cause__ = error
    assert explain(wrapped) is error


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.EACCES, "the right to write"), (errno.EROFS, "read-only"), (errno.EIO, "file system")],
)
def test_a_system_error_names_the_path_and_a_fix(number, fix):
    message = str(explain(OSError(number, "...", "/data/06_models")))
    assert message.startswith("/data/06_models: ")
    assert fix in message


def test_mlflow_without_boto3_names_the_extra():
    message = str(explain(ModuleNotFoundError("No module named 'boto3'", name="boto3")))
    assert message.startswith("MLflow's artifacts are on S3: found no package boto3. Fix: ")
    assert re.search(r"/bin/pip install --constraint constraints.txt 'boto3>=.*' 's3fs>=", message)


def test_an_unexpected_error_is_one_message_and_its_stack_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def fails():
        raise RuntimeError("https://me:canary@host/\nsecond line")

    with pytest.raises(RuntimeError), explained_errors(show_traceback=True):
        fails()
    with (
        pytest.raises(PipelineError, match="unexpected RuntimeError: https") as caught,
        explained_errors(show_traceback=False),
    ):
        fails()
    assert "https://...@host/" in str(caught.value)
    assert "second line" not in str(caught.value)
    (file,) = Path("tracebacks").iterdir()
    assert str(file) in str(caught.value)
    assert "in fails" in file.read_text()
    assert "canary" not in file.read_text()


def test_an_interruption_is_not_called_an_error(capsys):
    with pytest.raises(Interrupted) as caught, explained_errors(show_traceback=False):
        raise KeyboardInterrupt
    caught.value.show()
    printed = capsys.readouterr()
    assert "Error" not in printed.out + printed.err
    assert caught.value.exit_code == 130
    assert "Run the same command again to go on" in caught.value.message
