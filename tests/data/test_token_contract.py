"""The token contract between models."""

import json

import pytest

from rlhf_pipeline.data.token_contract import TokenContract, common_contract
from rlhf_pipeline.errors import ArtifactError


def test_a_saved_contract_is_read_back(tokenizer, tmp_path):
    contract = TokenContract.of(tokenizer)
    contract.write(tmp_path)
    assert TokenContract.read(tmp_path) == contract
    assert (contract.pad_id, contract.eos_id, contract.bos_id, contract.vocab_size) == (
        0,
        1,
        None,
        len(tokenizer),
    )


def test_padding_that_equals_eos_is_refused(tokenizer):
    tokenizer.pad_token = tokenizer.eos_token
    with pytest.raises(
        ArtifactError,
        match=r"found padding token '<\|end\|>', expected one that differs from EOS '<\|end\|>'",
    ):
        TokenContract.of(tokenizer)


def test_current_padding_settings_do_not_count(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path)
    other(["a", "much longer text"], padding=True, truncation=True, max_length=4)
    assert TokenContract.of(other) == TokenContract.of(tokenizer)


def test_the_error_names_the_first_difference(tokenizer, tmp_path):
    models = {name: tmp_path / name for name in ("sft_model", "reward_model")}
    for folder in models.values():
        folder.mkdir()
        TokenContract.of(tokenizer).write(folder)
    file = models["reward_model"] / "token_contract.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_id": 7}))
    with pytest.raises(
        ArtifactError,
        match=r"sft_model and reward_model use different tokenizers: eos_id is 1 in .* and 7 in",
    ):
        common_contract(models)


def test_a_model_without_a_contract_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match=r"token_contract\.json not found"):
        common_contract({"reward_model": tmp_path})
