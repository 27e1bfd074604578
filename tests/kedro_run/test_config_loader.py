"""The layers of the configuration, and which one wins."""

from functools import reduce
from operator import getitem

import pytest
from kedro.config import MissingConfigException

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.kedro_run.config_loader import PACKAGED, LayeredConfigLoader, check_environment
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS

LAYERS = {
    "base": "seed: 1\nbase_model: {path: null}\nsft: {epochs: 2, batch_size: 32}\n"
    "register: {model: 'policy${suffix:}'}\n",
    "embedded/model": "base_model: {vocab_size: 512, architecture: {model_type: llama}}\n"
    "sft: {epochs: 9}\n",
    "embedded/data": "split: {sources: [{name: synthetic}], test_fraction: 0.5}\n",
    "tiny": "sft: {batch_size: 16}\nbase_model: {architecture: {hidden_size: 8}}\n",
}


@pytest.fixture
def conf(tmp_path):
    """Writes files by layer; returns the loader of an environment."""

    def write(layer, text, name="parameters"):
        (tmp_path / layer).mkdir(parents=True, exist_ok=True)
        (tmp_path / layer / f"{name}.yml").write_text(text)

    def load(env=None, local="", local_root=None, **runtime):
        for layer, text in (LAYERS | {"local": local}).items():
            write(layer, text)
        for layer, root in {"base": "data", "tiny": "data/tiny", "local": local_root}.items():
            if root is not None:
                write(layer, f"root: {root}\n", "globals")
        return LayeredConfigLoader(
            str(tmp_path), env=env, runtime_params=runtime, **CONFIG_LOADER_ARGS
        )

    return load


EMBEDDED = {
    "base_model.vocab_size": 512, "sft": {"epochs": 9, "batch_size": 32},
    "split": {"sources": [{"name": "synthetic"}], "test_fraction": 0.5},
    "register.model": "policy-embedded",
}  # fmt: skip
BY_PATH = {
    "base_model": {"path": "gpt2"}, "sft": {"epochs": 2, "batch_size": 32},
    "split.sources": [{"name": "synthetic"}], "register.model": "policy",
}  # fmt: skip
GPT2, SOURCES = "base_model: {path: gpt2}\n", {"sources": [{"name": "files", "path": "x.csv"}]}


@pytest.mark.parametrize(
    ("env", "given", "expected"),
    [
        # Without anything of the user's, the embedded default applies.
        (None, {}, EMBEDDED),
        # A path alone replaces the embedded model, its learning rates and its name.
        (None, {"local": GPT2}, BY_PATH),
        (None, {"base_model": {"path": "gpt2"}}, BY_PATH),
        # Sources alone replace the embedded data and its fractions.
        (None, {"split": SOURCES}, {"split": SOURCES, "base_model.vocab_size": 512}),
        # conf/local is read with an environment, too, and wins over its architecture.
        ("tiny", {"local": f"{GPT2}sft: {{batch_size: 4}}\n"},
         {"sft.batch_size": 4, "base_model": {"path": "gpt2"}, "register.model": "policy-tiny"}),
        ("tiny", {"register": {"model": "mine"}}, {"register.model": "mine"}),
        # An architecture above a path is left for the checks to refuse.
        (None, {"local": GPT2, "base_model": {"vocab_size": 9}},
         {"base_model": {"path": "gpt2", "vocab_size": 9}}),
    ],
)  # fmt: skip
def test_the_layers_of_the_parameters(conf, env, given, expected):
    parameters = conf(env, **given)["parameters"]
    for place, value in expected.items():
        assert reduce(getitem, place.split("."), parameters) == value, place


@pytest.mark.parametrize(
    ("file", "hint"),
    [
        ("local/params.yml", " (did you mean parameters.yml?)"),
        ("tiny/paramters_ppo.yml", " (did you mean parameters.yml?)"),
        ("tiny/settings.yml", ""),
    ],
)
def test_a_file_that_is_not_read_is_refused(conf, tmp_path, file, hint):
    """What it sets would silently be missing."""
    loader = conf(env="tiny")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("seed: 2\n")
    with pytest.raises(ConfigError) as refusal:
        loader["parameters"]
    assert refusal.value.message == (
        f"{tmp_path}/{file} is not read{hint}. Fix: rename it to catalog*, parameters*, "
        "credentials* or globals.yml, or remove it"
    )


def test_files_for_other_programs_are_no_configuration(conf, tmp_path):
    loader = conf(env="tiny")
    (tmp_path / "tiny" / "tasks.d").mkdir()
    for file in ("local/.old.yml", "tiny/credentials.yml", "tiny/tasks.d/sums.yaml"):
        (tmp_path / file).write_text("")
    assert loader["parameters"]["seed"] == 1


@pytest.mark.parametrize(("layer", "env"), [("local", None), ("tiny", "tiny")])
def test_a_layer_in_the_current_folder_wins_over_that_of_the_package(
    tmp_path, monkeypatch, layer, env
):
    """The user's, or a preset of `rlhf-pipeline rlhf preset`; also below a hidden folder."""
    here = tmp_path / ".hidden"
    (here / "conf" / layer).mkdir(parents=True)
    (here / "conf" / layer / "parameters.yml").write_text("seed: 77\n")
    monkeypatch.chdir(here)
    loader = LayeredConfigLoader(str(PACKAGED), env=env, **CONFIG_LOADER_ARGS)
    assert loader["parameters"]["seed"] == 77
    assert loader.origin("seed") == f"conf/{layer}/parameters.yml"
    assert loader["globals"]["root"] == "data"  # the folder has no globals.yml
    check_environment(PACKAGED, "tiny")
    with pytest.raises(ConfigError, match="--env: found 'mine'; the environments"):
        check_environment(PACKAGED, "mine")
    (here / "conf" / "mine").mkdir()
    check_environment(PACKAGED, "mine")


def test_the_root_of_an_environment_wins_over_that_of_conf_local(conf, tmp_path):
    assert conf(local_root="/big")["globals"]["root"] == "/big"
    assert conf("tiny", local_root="/big")["globals"]["root"] == "data/tiny"
    (tmp_path / "own").mkdir()
    assert conf("own", local_root="/big")["globals"]["root"] == "/big"


def test_every_parameter_knows_the_file_that_sets_it(conf, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    loader = conf("tiny", sft={"epochs": 3})
    loader["parameters"]
    assert loader.origin("sft.epochs") == "--params"
    assert loader.origin("sft.batch_size") == "tiny/parameters.yml"
    assert loader.origin("base_model.vocab_size") == "embedded/model/parameters.yml"
    assert loader.origin("ppo.steps") is None


@pytest.mark.parametrize("env", [None, "tiny"])
def test_credentials_of_local_count_with_every_environment(conf, tmp_path, env):
    with pytest.raises(MissingConfigException):
        conf(env)["credentials"]
    (tmp_path / "local" / "credentials.yml").write_text("s3: {key: mine}\n")
    (tmp_path / "base" / "credentials.yml").write_text("s3: {key: ours}\nother: {key: b}\n")
    assert conf(env)["credentials"] == {"s3": {"key": "mine"}, "other": {"key": "b"}}
