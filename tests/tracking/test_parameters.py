"""A configuration as MLflow takes it: flat names, and values as long as it allows."""

from rlhf_pipeline.tracking.parameters import cut, parameters


def test_nested_fields_have_dotted_names_and_values_are_spelled_as_in_the_job():
    found = parameters(
        {"ppo": {"lr": 1e-6, "lora": None, "betas": [0.9, 0.95]}, "path": "tiny"}, seed=3
    )
    assert found == {
        "ppo.lr": "1e-06",
        "ppo.lora": "null",
        "ppo.betas": "[0.9, 0.95]",
        "path": "tiny",
        "seed": "3",
    }


def test_they_fit_mlflows_limits():
    found = parameters({"source": {"my|data": "x" * 7000, "empty": {}}}, seed=3)
    assert found == {"source.my_data": "x" * 5999 + "…", "source.empty": "{}", "seed": "3"}


def test_only_what_is_too_long_is_cut():
    assert [cut("four", 4), cut("fives", 4)] == ["four", "fiv…"]
