"""Broken rows reach the report from sources whose records span several rows."""

import pytest

from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.data.sources import nvidia, openassistant, salesforce

BROKEN = Unused("not JSON")


@pytest.mark.parametrize("source", [nvidia, openassistant, salesforce])
def test_a_broken_row_is_passed_on(source):
    assert list(source.assemble([("a:1", BROKEN)])) == [("a:1", BROKEN)]


def test_a_broken_row_does_not_divide_a_pair():
    row = {"prompt": "Why?", "response": "So.", "helpfulness": 1}
    rows = [("a:1", row), ("a:2", BROKEN), ("a:3", row | {"helpfulness": 2, "response": "Well."})]
    (first, broken), (second, pair) = nvidia.assemble(rows)
    assert (first, broken, second) == ("a:2", BROKEN, "a:1")
    assert (pair.chosen, pair.rejected) == ("Well.", "So.")
