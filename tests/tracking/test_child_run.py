"""A configuration as MLflow accepts it: flat names and values of limited length."""

from rlhf_pipeline.tracking.mirror import parameters, truncate


def test_nested_fields_have_dotted_names_and_values_are_json():
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


def test_names_and_values_fit_the_limits_of_mlflow():
    found = parameters({"source": {"my|data": "x" * 7000, "empty": {}}}, seed=3)
    assert found == {"source.my_data": "x" * 5999 + "…", "source.empty": "{}", "seed": "3"}


def test_only_long_values_are_truncated():
    assert [truncate("four", 4), truncate("fives", 4)] == ["four", "fiv…"]
