"""The token contract between checkpoints."""

import json

import pytest

from rlhf_pipeline.data.token_contract import TokenContract, common_contract
from rlhf_pipeline.errors import ArtifactError


def test_a_contract_survives_saving(tokenizer, tmp_path):
    contract = TokenContract.of(tokenizer)
    contract.write(tmp_path)
    assert TokenContract.read(tmp_path) == contract
    assert (contract.pad_id, contract.eos_id, contract.bos_id, contract.vocab_size) == (
        0,
        1,
        None,
        len(tokenizer),
    )


def test_padding_that_equals_eos_is_refused(tokenizer, make_model):
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(make_model())
    other.pad_token = other.eos_token
    with pytest.raises(
        ArtifactError, match=r"pads with '<\|end\|>', which must be set and differ from EOS"
    ):
        TokenContract.of(other)


def test_padding_settings_of_the_moment_are_no_part_of_it(tokenizer, make_model):
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(make_model())
    other(["a", "much longer text"], padding=True, truncation=True, max_length=4)
    assert TokenContract.of(other) == TokenContract.of(tokenizer)


def test_the_first_difference_is_named(make_model):
    one, other = make_model(), make_model()
    fields = json.loads((other / "token_contract.json").read_text()) | {"eos_id": 7}
    (other / "token_contract.json").write_text(json.dumps(fields))
    with pytest.raises(
        ArtifactError,
        match=r"sft_model and reward_model do not speak the same tokens: eos_id is 1 in .* and 7 in",
    ):
        common_contract({"sft_model": one, "reward_model": other})


def test_a_foreign_checkpoint_is_named(tmp_path):
    with pytest.raises(ArtifactError, match=r"has no token_contract\.json"):
        common_contract({"reward_model": tmp_path})
