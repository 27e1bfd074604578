"""Chat models with their own control tokens and templates: the pipeline agrees with transformers.

SmolLM2's tokenizer is tested where SMOLLM2_PATH is its folder.
"""

import os
from datetime import datetime

import pytest
import torch
from chat_models import CHAT_MODELS, SMOLLM2, fetch, publish
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.utils import chat_template_utils

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.data.phase_files import RowMaker, demonstration
from rlhf_pipeline.data.token_contract import Reader, TokenContract
from rlhf_pipeline.data.tokenization import tokenize
from rlhf_pipeline.distributed.model_files import save_model
from rlhf_pipeline.generation.records import ended
from rlhf_pipeline.generation.transformers_generator import TransformersGenerator
from rlhf_pipeline.models.loading import freeze, load_finished, load_policy, load_tokenizer
from rlhf_pipeline.models.scalar_head import load_scores

SYSTEM = {"role": "system", "content": "Be kind."}
QUESTION = {"role": "user", "content": "Where do penguins live?"}
ANSWER = {"role": "assistant", "content": "They live in the south."}
LAST = {"role": "assistant", "content": "Blue."}
DIALOGUES = [
    [QUESTION, LAST],
    [SYSTEM, QUESTION, ANSWER, {"role": "user", "content": "And the sky?"}, LAST],
]


@pytest.fixture(scope="module", params=CHAT_MODELS)
def name(request):
    if request.param == "SmolLM2" and SMOLLM2 not in os.environ:
        pytest.skip(f"{SMOLLM2} is not set: the folder with the tokenizer of SmolLM2-Instruct")
    return request.param


@pytest.fixture(scope="module")
def published(name, tmp_path_factory):
    """The model as on the hub: after each letter comes another one, which an EOS follows."""
    ends = CHAT_MODELS[name].ends
    following = {"d": "d"}
    for first, second, end in zip("abc", "xyz", ends, strict=False):
        following |= {first: second, second: end}
    return publish(name, tmp_path_factory.mktemp("published"), following=following)


@pytest.fixture(scope="module")
def artifact(published, tmp_path_factory):
    """The artifact of stage base_model."""
    return fetch(published, tmp_path_factory.mktemp("base_model"))


@pytest.fixture
def on_the_template_s_date(monkeypatch):
    """transformers renders the date that the artifact's template has by default."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2024, 7, 26)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


def demonstration_of(dialogue, artifact, sft_loss="response"):
    """The row of SFT that the split writes of a dialogue."""
    tokenizer, contract = load_tokenizer(artifact), TokenContract.read(artifact)
    example = {"id": "own:0", "prompt": dialogue[:-1], "rejected": None}
    example["chosen"] = dialogue[-1]["content"]
    (tokens,) = tokenize([example], Reader(tokenizer, contract), [sft_loss == "assistant"])
    config = SplitConfig(
        sources=[{}], max_prompt_tokens=512, max_response_tokens=256, sft_loss=sft_loss
    )
    row = RowMaker(config, tokenizer.bos_token_id).make("own", example, tokens, "sft")
    return demonstration(row, config)


def test_the_contract_has_every_end_and_a_padding_token_of_its_own(name, published, artifact):
    tokenizer, contract = load_tokenizer(artifact), TokenContract.read(artifact)
    assert set(tokenizer.convert_ids_to_tokens(list(contract.eos_ids))) == set(
        CHAT_MODELS[name].ends
    )
    assert contract.eos_id == tokenizer.eos_token_id
    assert contract.pad_id == tokenizer.pad_token_id
    assert contract.pad_id not in contract.eos_ids
    assert contract.vocab_size == len(tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(artifact)
    assert loaded.generation_config.eos_token_id == contract.eos_token_id
    rows = loaded.get_input_embeddings().num_embeddings
    before = AutoModelForCausalLM.from_pretrained(published).get_input_embeddings().num_embeddings
    # One more token than the published model has rows, so the embedding grows.
    assert before < contract.vocab_size <= rows and rows % 64 == 0
    assert loaded.config.vocab_size == rows


@pytest.mark.parametrize("dialogue", DIALOGUES, ids=["one turn", "two turns"])
def test_prompt_and_response_are_the_tokens_of_the_chat_template(
    name, published, artifact, dialogue, on_the_template_s_date
):
    own = AutoTokenizer.from_pretrained(published)
    row = demonstration_of(dialogue, artifact)
    prompt = own.apply_chat_template(dialogue[:-1], add_generation_prompt=True, return_dict=False)
    whole = own.apply_chat_template(dialogue, return_dict=False)
    assert row["prompt_ids"] == prompt
    learned = prompt + row["response_ids"]
    assert learned == whole[: len(learned)]
    assert own.decode(row["response_ids"]) == f"Blue.{CHAT_MODELS[name].turn_end}"
    assert row["loss_mask"] == [True] * len(row["response_ids"])
    # The template has nothing after the response, except white space.
    assert own.decode(whole[len(learned) :]).strip() == ""


def test_sft_learns_every_turn_of_the_assistant_with_its_end(name, artifact):
    row = demonstration_of(DIALOGUES[1], artifact, sft_loss="assistant")
    learned = [
        token for token, own in zip(row["response_ids"], row["loss_mask"], strict=True) if own
    ]
    end = CHAT_MODELS[name].turn_end
    assert load_tokenizer(artifact).decode(learned) == f"They live in the south.{end}Blue.{end}"


def generated(model, prompts, **options):
    """Responses of transformers' own generation to prompts of one token, up to the first EOS."""
    ids = torch.tensor(prompts)
    output = model.generate(ids, max_new_tokens=4, do_sample=False, **options)
    ends = model.generation_config.eos_token_id
    rows = []
    for row in output[:, 1:].tolist():
        end = next((n for n, token in enumerate(row, 1) if token in ends), len(row))
        rows.append(row[:end])
    return rows


def test_generation_stops_at_any_end_like_transformers(name, published, artifact):
    contract = TokenContract.read(artifact)
    tokenizer = AutoTokenizer.from_pretrained(published)
    prompts = [[tokenizer.convert_tokens_to_ids(letter)] for letter in "abcd"]
    policy = freeze(load_policy(artifact, "fp32"))
    sampling = SamplingConfig(max_response_tokens=4, batch_size_per_gpu=4, temperature=0.05)
    generator = TransformersGenerator(policy, contract)
    sequences = generator.generate(prompts, sampling, [(n,) for n in range(4)]).sequences
    responses = [
        row[mask].tolist()
        for row, mask in zip(sequences.response_ids, sequences.action_mask, strict=True)
    ]
    ends = CHAT_MODELS[name].ends
    for response, second, end in zip(responses, "xyz", ends, strict=False):
        assert tokenizer.convert_ids_to_tokens(response) == [second, end]
    assert tokenizer.convert_ids_to_tokens(responses[3]) == ["d"] * 4
    whole = AutoModelForCausalLM.from_pretrained(published)
    known = len(ends)
    assert responses[:known] == generated(whole, prompts[:known], pad_token_id=contract.pad_id)

    rows = sequences.rows(torch.tensor([*range(known), 3]))
    assert ended(rows, contract).tolist() == [True] * known + [False]


def test_trained_models_keep_all_ends_and_are_served_with_them(name, artifact, tmp_path):
    """After the prompt's last token comes "b", then "c", then the last of the model's ends."""
    tokenizer, contract = load_tokenizer(artifact), TokenContract.read(artifact)
    prompt = tokenizer.apply_chat_template(
        [QUESTION], add_generation_prompt=True, return_dict=False
    )
    for kind, model in (
        ("reward model", load_scores(artifact, "fp32", new_head=True)),
        ("policy", policy := load_policy(artifact, "fp32")),
    ):
        if kind == "policy":
            end = contract.eos_ids[-1]
            last, b, c, d = prompt[-1], *tokenizer.convert_tokens_to_ids(list("bcd"))
            embeddings = policy.get_input_embeddings().weight.detach()
            head = policy.get_output_embeddings().weight
            with torch.no_grad():
                head.zero_()
                for token, following in ((last, b), (b, c), (c, end), (end, d)):
                    head[following] += 20 * embeddings[token]
        save_model(model, tokenizer, tmp_path / kind)
        assert TokenContract.read(tmp_path / kind) == contract

    model, tokenizer = load_finished(tmp_path / "policy")
    answer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    (found,) = answer([QUESTION], return_full_text=False, max_new_tokens=6)
    assert found["generated_text"] == "bc"


def test_the_artifact_s_template_renders_a_fixed_date(tmp_path):
    published = publish("Llama 3.1", tmp_path / "published")
    artifact = fetch(published, tmp_path / "own date", template_date="2023-02-01")
    text = load_tokenizer(artifact).apply_chat_template([QUESTION], tokenize=False)
    assert "\nToday Date: 01 Feb 2023\n" in text
