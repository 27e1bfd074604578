"""The base model's block."""

import pytest
from pydantic import ValidationError

from rlhf_pipeline.config.base_model import BaseModelConfig


def test_nothing_of_a_model_is_executed_unless_the_user_says_so():
    config = BaseModelConfig(path="facebook/opt-350m")
    assert (config.trust_remote_code, config.unpickle_weights) == (False, False)


@pytest.mark.parametrize("option", ["trust_remote_code", "unpickle_weights"])
def test_a_built_model_has_nothing_to_trust(option):
    with pytest.raises(ValidationError, match="are about path, which is null"):
        BaseModelConfig(architecture={"model_type": "llama"}, vocab_size=512, **{option: True})


def test_a_url_with_a_token_is_refused_and_not_repeated():
    with pytest.raises(
        ValidationError, match="give the hub's token as HF_TOKEN in the environment"
    ) as refusal:
        BaseModelConfig(path="https://me:canary@huggingface.co/facebook/opt-350m")
    assert "canary" not in str(refusal.value)
