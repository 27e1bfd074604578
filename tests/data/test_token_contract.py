"""The token contract between models."""

import json

import pytest

from rlhf_pipeline.data.token_contract import TokenContract, common_contract
from rlhf_pipeline.errors import ArtifactError


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
    different = r"sft_model and reward_model use different tokenizers: eos_ids is \(1,\) .*\(7,\)"
    with pytest.raises(ArtifactError, match=different):
        common_contract(models)
    file.unlink()
    with pytest.raises(ArtifactError, match=r"token_contract\.json not found"):
        common_contract(models)


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
    fixed = contract.pad_id, contract.bos_id, contract.vocab_size
    assert fixed == (0, None, len(tokenizer))


@pytest.mark.parametrize(
    ("changes", "model_eos", "message"),
    [
        ({"pad_token": "<|end|>"}, None, r"found padding token '<\|end\|>', expected one that "
         r"differs from EOS '<\|end\|>'"),
        ({"eos_token": None}, 1, "found no EOS token, so a response could never end"),
        ({}, [1, 70], r"found eos_token_id 70 in the model's generation config, which is '.', "
         "expected a control token"),
        ({}, [10**6], "found eos_token_id 1000000 .* is None"),
        ({}, 288, "found eos_token_id 288 .* is 'penguin', expected a control token"),
    ],
)  # fmt: skip
def test_unfit_tokens_are_refused(tokenizer, changes, model_eos, message):
    tokenizer.add_tokens(["penguin"])
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    with pytest.raises(ArtifactError, match=message):
        TokenContract.of(tokenizer, model_eos)
