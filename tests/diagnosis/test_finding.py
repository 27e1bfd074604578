"""All checks run at once, and none hides another."""

import time

from rlhf_pipeline.diagnosis.finding import Finding, run_checks
from rlhf_pipeline.errors import ConfigError


def fine(_):
    return Finding("fine", "ok", "found")


def explained(_):
    raise ConfigError("place: found 1, expected 2. Fix: set 2 at s3://me:secret@host/file")


def unexpected(_):
    raise ZeroDivisionError("first line\nsecond line")


def too_slow(_):
    time.sleep(2)


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


def test_a_check_without_answer_is_a_failure_and_nobody_waits_for_it(setup):
    start = time.monotonic()
    late, on_time = run_checks([too_slow, fine], setup(), budget_s=0.2)
    assert time.monotonic() - start < 1
    assert (late.check, late.state) == ("too slow", "failure")
    assert late.found == "no answer within 0.2 s"
    assert on_time.state == "ok"


def test_all_checks_share_one_budget(setup):
    start = time.monotonic()
    found = run_checks([too_slow] * 4, setup(), budget_s=0.4)
    assert time.monotonic() - start < 1.2
    assert [each.found for each in found] == ["no answer within 0.4 s"] * 4


def test_a_check_that_reports_a_timeout_has_answered(setup):
    (found,) = run_checks([timed_out], setup())
    assert found.found == "TimeoutError: the server is silent"
