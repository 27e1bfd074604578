"""The token contract between models."""

import json

import pytest

from rlhf_pipeline.data.token_contract import TokenContract, common_contract
from rlhf_pipeline.errors import ArtifactError


def test_a_saved_contract_is_read_back(tokenizer, tmp_path):
    contract = TokenContract.of(tokenizer)
    contract.write(tmp_path)
    assert TokenContract.read(tmp_path) == contract
    assert (contract.pad_id, contract.eos_ids, contract.bos_id, contract.vocab_size) == (
        0,
        (1,),
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
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_ids": [7]}))
    with pytest.raises(
        ArtifactError,
        match=r"sft_model and reward_model use different tokenizers: eos_ids is \(1,\) in .*\(7,\)",
    ):
        common_contract(models)


def test_a_model_without_a_contract_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match=r"token_contract\.json not found"):
        common_contract({"reward_model": tmp_path})


def test_the_tokenizer_s_eos_comes_first_and_the_model_s_follow(tokenizer, tmp_path):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot|>", "<|eom|>"]})
    turn, message = tokenizer.convert_tokens_to_ids(["<|eot|>", "<|eom|>"])
    contract = TokenContract.of(tokenizer, [message, 1, turn])
    assert contract.eos_ids == (1, turn, message)
    assert contract.eos_token_id == [1, turn, message]
    assert TokenContract.of(tokenizer, turn).eos_ids == (1, turn)
    for model_eos in (None, 1, [1]):
        assert TokenContract.of(tokenizer, model_eos).eos_token_id == 1
    contract.write(tmp_path)
    assert TokenContract.read(tmp_path) == contract


@pytest.mark.parametrize(("number", "token"), [(70, "."), (10**6, "None")])
def test_an_ordinary_token_cannot_end_responses(tokenizer, number, token):
    with pytest.raises(
        ArtifactError,
        match=rf"found eos_token_id {number} in the model's generation config, which is .*{token}.*"
        ", expected a control token",
    ):
        TokenContract.of(tokenizer, [1, number])


def test_a_tokenizer_without_eos_is_refused(tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(ArtifactError, match="found no EOS token, so a response could never end"):
        TokenContract.of(tokenizer, 1)
