"""The block `base_model`."""

import pytest
from pydantic import ValidationError

from rlhf_pipeline.config.base_model import BaseModelConfig


def test_code_and_pickles_are_not_trusted_by_default():
    config = BaseModelConfig(path="facebook/opt-350m")
    assert (config.trust_remote_code, config.unpickle_weights) == (False, False)


@pytest.mark.parametrize("option", ["trust_remote_code", "unpickle_weights"])
def test_trust_without_a_path_is_refused(option):
    with pytest.raises(ValidationError, match="without path, expected path"):
        BaseModelConfig(architecture={"model_type": "llama"}, vocab_size=512, **{option: True})


def test_a_url_with_a_token_is_refused_and_not_repeated():
    with pytest.raises(
        ValidationError,
        match=r"found a URL, expected .* set the hub's token as HF_TOKEN in the environment",
    ) as refusal:
        BaseModelConfig(path="https://me:canary@huggingface.co/facebook/opt-350m")
    assert "canary" not in str(refusal.value)


def test_the_template_s_date_is_part_of_the_recipe():
    assert BaseModelConfig(path="lab/chat").recipe()["template_date"] == "2024-07-26"
    changed = BaseModelConfig(path="lab/chat", template_date="2023-02-01")
    assert changed.recipe()["template_date"] == "2023-02-01"


@pytest.mark.parametrize("option", ["trust_remote_code", "unpickle_weights"])
def test_trust_in_a_gguf_file_is_refused(option):
    with pytest.raises(ValidationError, match=r"with a \.gguf file, .* Fix: set both to false"):
        BaseModelConfig(path="model.gguf", **{option: True})
    assert BaseModelConfig(path="model.gguf").is_gguf
    assert not BaseModelConfig(path="model").is_gguf
