"""What the settings change in Kedro."""

import numpy as np
import pandas as pd
import pytest
from kedro.io import MemoryDataset, memory_dataset

from rlhf_pipeline.settings import ask_kedro, copy_mode


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        *((parameter, "deepcopy") for parameter in ({"lr": 1e-6}, None, 3, "text", [1])),
        (np.zeros(2), "copy"),
        (np.zeros(2).view(np.recarray), "copy"),
        (pd.DataFrame([1]), "copy"),
        (type("Own", (pd.DataFrame,), {})([1]), "copy"),
        (type("DataFrame", (), {})(), "assign"),  # as Spark's
    ],
)
def test_parameters_and_tables_of_the_user_are_copied_as_kedro_copies_them(value, mode):
    assert copy_mode(value) == ask_kedro(value) == mode


def test_kedro_asks_for_all_that_it_keeps_in_memory():
    assert memory_dataset._infer_copy_mode is copy_mode
    assert MemoryDataset({"a": 1}).load() == {"a": 1}
