"""Models' own code is executed because the user of this run says so, and for no other reason."""

import json

from kedro.io import DataCatalog, MemoryDataset

from rlhf_pipeline.hooks import SwitchesHook
from rlhf_pipeline.stages.trust import trusting, trusts_remote_code


def test_a_program_learns_it_from_its_job(drill):
    export = drill.run()
    assert (export / "trusts").read_text() == "False"
    with trusting(True):
        trusted = drill.run()
    assert trusted != export and (trusted / "trusts").read_text() == "True"
    assert "trust_remote_code" not in json.loads((export.parent / "recipe.json").read_text())
    assert json.loads((trusted.parent / "recipe.json").read_text())["trust_remote_code"] is True


def test_it_holds_for_one_run():
    def before(trusted):
        block = {"path": "facebook/opt-350m", "trust_remote_code": trusted}
        hook.before_pipeline_run(catalog=DataCatalog({"parameters": MemoryDataset({"base_model": block})}))

    hook = SwitchesHook()
    before(False)
    assert not trusts_remote_code()
    hook.after_pipeline_run()
    before(True)
    assert trusts_remote_code()
    hook.on_pipeline_error()
    assert not trusts_remote_code()
