"""All checks run, and none hides another."""

from rlhf_pipeline.diagnosis.finding import Finding, run_checks
from rlhf_pipeline.errors import ConfigError


def fine(_):
    return Finding("fine", "ok", "found")


def explained(_):
    raise ConfigError("place: found 1, expected 2. Fix: set 2 at s3://me:secret@host/file")


def unexpected(_):
    raise ZeroDivisionError("first line\nsecond line")


def timed_out(_):
    raise TimeoutError("the server is silent")


def test_an_error_is_a_failure_with_its_fix_and_the_order_stays(setup):
    found = run_checks([explained, fine, unexpected], setup())
    assert found == [
        Finding(
            "explained",
            "failure",
            "place: found 1, expected 2.",
            "set 2 at s3://...@host/file",
        ),
        Finding("fine", "ok", "found"),
        Finding(
            "unexpected",
            "failure",
            "ZeroDivisionError: first line",
            "repair what the message names",
        ),
    ]


def test_a_check_that_reports_a_timeout_has_answered(setup):
    (found,) = run_checks([timed_out], setup())
    assert found.found == "TimeoutError: the server is silent"
