"""Errors of the hub."""

import pytest

from rlhf_pipeline.runtime.hub import commit_of


def test_an_error_of_the_hub_is_shown_without_the_password_of_its_address(monkeypatch):
    def fail(*_, **__):
        raise OSError("500 for url 'http://me:canary@mirror/api/models/a/b?sig=canary'")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    with pytest.raises(LookupError) as failure:
        commit_of("model", "a/b", None)
    assert str(failure.value).endswith("500 for url 'http://...@mirror/api/models/a/b?...'")
