"""The environment smollm2: its checkable reward."""

from pathlib import Path

import pytest

from rlhf_pipeline.config.rewards import CallableReward
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.scoring.sources import import_function

FILE = Path(__file__).parents[1] / "conf" / "smollm2" / "rewards.py"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Nobody knows that yet.", 0),  # four words
        ("Nobody here knows that yet.", 1),
        ("Nobody here knows that yet", 0),  # perhaps cut
        ("No. Nobody here knows that yet.", 0),
        ("Is that so, or do only some of us think it is?", 1),  # twelve
        ("Is that so, or do only some of us think that it is?", 0),
        ("", 0),
    ],
)
def test_one_sentence_of_five_to_twelve_words(answer, expected):
    job = LaunchedJob("ppo", "f", 1, {}, {"rewards.0": FILE}, {}, FILE.parent, 60.0)
    function = import_function(CallableReward(callable=f"{FILE}:one_sentence"), job, "rewards.0")
    assert function([[]], [answer]) == [expected]
