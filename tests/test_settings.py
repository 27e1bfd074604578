"""What the settings change in Kedro."""

import numpy as np
import pandas as pd
import pytest
from kedro.io import MemoryDataset, memory_dataset

from rlhf_pipeline.settings import ask_kedro, copy_mode


@pytest.mark.parametrize("value", [{"lr": 1e-6}, None, 3, "text", [1]])
def test_a_parameter_is_copied_as_kedro_copies_it(value):
    assert copy_mode(value) == ask_kedro(value) == "deepcopy"


@pytest.mark.parametrize(
    ("table", "mode"),
    [
        (np.zeros(2), "copy"),
        (np.zeros(2).view(np.recarray), "copy"),
        (pd.DataFrame([1]), "copy"),
        (type("Own", (pd.DataFrame,), {})([1]), "copy"),
        (type("DataFrame", (), {})(), "assign"),  # as Spark's
    ],
)
def test_a_table_of_the_user_is_copied_as_kedro_copies_it(table, mode):
    assert copy_mode(table) == ask_kedro(table) == mode


def test_kedro_asks_for_all_that_it_keeps_in_memory():
    assert memory_dataset._infer_copy_mode is copy_mode
    assert MemoryDataset({"a": 1}).load() == {"a": 1}
