"""The versions of a registered model, by their content."""

from rlhf_pipeline.tracking.store import DIGEST_TAG, connect, tracking_uri
from rlhf_pipeline.tracking.versions import registration


def test_the_newest_version_with_a_content_and_its_tags(tmp_path):
    client = connect(tracking_uri(tmp_path), tmp_path)
    assert registration("a", "mine", tmp_path) is None
    for model, digest in (("mine", "a"), ("mine", "b"), ("mine", "a"), ("other", "a")):
        if model not in [found.name for found in client.search_registered_models()]:
            client.create_registered_model(model)
        client.create_model_version(model, source=str(tmp_path), tags={DIGEST_TAG: digest})
    client.set_model_version_tag("mine", "3", "rlhf.verdict", "{}")
    assert registration("a", "mine", tmp_path) == ("3", {DIGEST_TAG: "a", "rlhf.verdict": "{}"})
    assert registration("b", "mine", tmp_path) == ("2", {DIGEST_TAG: "b"})
    assert registration("c", "mine", tmp_path) is None
