"""The tokens that SFT learns of any dialogue, compared with dialogues rendered by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.phase_files import Row, RowMaker, demonstration
from rlhf_pipeline.data.template import HUMAN_ASSISTANT_TEMPLATE
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.data.tokenization import tokenize

Piece = tuple[str, bool]
"""A piece of text, and whether the assistant says it."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + "
    "'<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>' + messages[0].content + "
    "'<</SYS>>' %}{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = "
    "messages %}{% endif %}{% for turn in turns %}{% if turn.role == 'user' %}{{ bos_token + "
    "'[INST] ' + (system if loop.first else '') + turn.content.strip() + ' [/INST]' }}{% else "
    "%}{{ ' ' + turn.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Dialogue:
    """A dialogue, including the last answer of the assistant."""

    system: str | None
    turns: list[tuple[str, str]]
    """Texts of the user, with the answers."""


def human_assistant(dialogue: Dialogue) -> list[Piece]:
    pieces = [(dialogue.system or "", False)]
    for user, assistant in dialogue.turns:
        pieces += [(f"\n\nHuman: {user}\n\nAssistant:", False), (f" {assistant}<|end|>", True)]
    return pieces


def human_assistant_with_bos(dialogue: Dialogue) -> list[Piece]:
    return [("<s>", False), *human_assistant(dialogue)]


def chatml(dialogue: Dialogue) -> list[Piece]:
    pieces = (
        []
        if dialogue.system is None
        else [(f"<|im_start|>system\n{dialogue.system}<|im_end|>\n", False)]
    )
    for user, assistant in dialogue.turns:
        pieces += [(f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n", False)]
        pieces += [(f"{assistant}<|im_end|>", True), ("\n", False)]
    return pieces[:-1]  # the model stops at the EOS


def llama_2(dialogue: Dialogue) -> list[Piece]:
    system = "" if dialogue.system is None else f"<<SYS>>{dialogue.system}<</SYS>>"
    pieces = []
    for index, (user, assistant) in enumerate(dialogue.turns):
        before = system if index == 0 else ""
        pieces += [
            (f"<s>[INST] {before}{user.strip()} [/INST]", False),
            (f" {assistant.strip()} </s>", True),
        ]
    return pieces


@dataclass(frozen=True)
class Format:
    template: str
    eos: str
    bos: str | None
    write: Callable[[Dialogue], list[Piece]]


FORMATS = {
    "human and assistant": Format(HUMAN_ASSISTANT_TEMPLATE, "<|end|>", None, human_assistant),
    "human and assistant with BOS": Format(
        HUMAN_ASSISTANT_TEMPLATE, "<|end|>", "<s>", human_assistant_with_bos
    ),
    "ChatML": Format(CHATML, "<|im_end|>", None, chatml),
    "Llama 2": Format(LLAMA_2, "</s>", "<s>", llama_2),
}
CONTROL = ("<|pad|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>")


@pytest.fixture(scope="module")
def tokenizers(trained: Tokenizer) -> dict[str, PreTrainedTokenizerFast]:
    """One tokenizer for each format."""
    made = {}
    for name, form in FORMATS.items():
        made[name] = PreTrainedTokenizerFast(
            tokenizer_object=trained, pad_token="<|pad|>", eos_token=form.eos, bos_token=form.bos,
            additional_special_tokens=["<|im_start|>"], chat_template=form.template,
        )  # fmt: skip
    return made


WORDS = st.lists(
    st.sampled_from([
        "Assistant:", "\n\nHuman: ", "\n\nAssistant: So.", "[INST]", " [/INST] ", "<|im",
        "assistant\n", " ", "The sky", "Größe", "日本語", "👍🏽", "e\u0301", "{{ eos_token }}",
        "\r\n",
    ])
    | st.text(max_size=4),
    max_size=4,
).map("".join)  # fmt: skip
TEXTS = WORDS.filter(lambda text: not any(token in text for token in CONTROL))
DIALOGUES = st.builds(
    Dialogue,
    system=st.none() | TEXTS,
    turns=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4),
)
FORMAT_NAMES = st.sampled_from(list(FORMATS))
SFT_LOSSES = st.sampled_from(["response", "assistant", "all"])


def row_of(dialogue: Dialogue, tokenizer: PreTrainedTokenizerFast, config: SplitConfig) -> Row:
    prompt = [] if dialogue.system is None else [{"role": "system", "content": dialogue.system}]
    for user, assistant in dialogue.turns:
        prompt += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    answer = prompt.pop()["content"]
    one = {"id": "own:1", "prompt": prompt, "chosen": answer, "rejected": None}
    contract = TokenContract.of(tokenizer)
    (tokens,) = tokenize([one], tokenizer, contract, turns=[config.sft_loss == "assistant"])
    return RowMaker(config, tokenizer.bos_token_id).make("own", one, tokens, "sft")


PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {chr(byte): byte for byte in PRINTABLE} | {
    chr(256 + number): byte
    for number, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE)
}
"""GPT-2's characters for bytes (https://github.com/openai/gpt-2/blob/master/src/encoder.py). A
token may end within a character, where decoding would lose bytes."""


def bytes_of(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> list[bytes]:
    tokens = tokenizer.convert_ids_to_tokens(ids)
    return [
        token.encode() if token in CONTROL else bytes(BYTES[sign] for sign in token)
        for token in tokens
    ]


def learned_bytes(
    columns: dict[str, list], tokenizer: PreTrainedTokenizerFast
) -> list[tuple[int, bool]]:
    """Every byte of a row, and whether it is learned."""
    ids = columns["prompt_ids"] + columns["response_ids"]
    learned = [False] * len(columns["prompt_ids"]) + columns["loss_mask"]
    pairs = zip(bytes_of(ids, tokenizer), learned, strict=True)
    return [(byte, own) for text, own in pairs for byte in text]


def expected_bytes(pieces: list[Piece], sft_loss: str) -> list[tuple[int, bool]]:
    """Every byte of a dialogue rendered by hand, and whether it is learned."""
    last = len(pieces) - 1
    learned = {
        "response": lambda index, _: index == last,
        "assistant": lambda _, own: own,
        "all": lambda *_: True,
    }[sft_loss]
    return [
        (byte, learned(index, own))
        for index, (text, own) in enumerate(pieces)
        for byte in text.encode()
    ]


def unlearned(text: list[tuple[int, bool]], count: int) -> list[tuple[int, bool]]:
    """The text with the bytes of the first token marked as not learned: nothing predicts it."""
    return [(byte, False) for byte, _ in text[:count]] + text[count:]


def check_columns(columns: dict[str, list]) -> None:
    assert len(columns["loss_mask"]) == len(columns["response_ids"])
    assert columns["loss_mask"][0] is True
    assert len(columns["prompt_ids"]) >= 1


FORGED = Dialogue(
    "Assistant: no", [("\n\nAssistant: So.<", ""), ("", " So. "), ("Assistant:", "\n\nHuman: Why?")]
)


@given(FORMAT_NAMES, DIALOGUES, SFT_LOSSES)
@example("ChatML", FORGED, "assistant")
@example("human and assistant", Dialogue(None, [("", "")]), "all")
@settings(max_examples=300, deadline=None)
def test_exactly_the_selected_tokens_are_learned(
    tokenizers, name: str, dialogue: Dialogue, sft_loss: str
) -> None:
    tokenizer, config = tokenizers[name], SplitConfig(
        sources=[{}], max_prompt_tokens=10_000, max_response_tokens=10_000, sft_loss=sft_loss
    )  # fmt: skip
    columns = demonstration(row_of(dialogue, tokenizer, config), config)
    check_columns(columns)
    first = len(bytes_of(columns["prompt_ids"][:1], tokenizer)[0])
    expected = expected_bytes(FORMATS[name].write(dialogue), sft_loss)
    assert learned_bytes(columns, tokenizer) == unlearned(expected, first)


@given(FORMAT_NAMES, DIALOGUES, SFT_LOSSES, st.integers(1, 40), st.integers(1, 12))
@example("Llama 2", FORGED, "assistant", 8, 3)
@settings(max_examples=300, deadline=None)
def test_cut_texts_keep_their_marks(
    tokenizers, name: str, dialogue: Dialogue, sft_loss: str, prompt_limit: int, response_limit: int
) -> None:
    tokenizer = tokenizers[name]
    config = SplitConfig(
        sources=[{}],
        max_prompt_tokens=prompt_limit,
        max_response_tokens=response_limit,
        sft_loss=sft_loss,
        over_long_prompts="truncate",
        over_long_responses="truncate",
    )
    row = row_of(dialogue, tokenizer, config)
    columns = demonstration(row, config)
    check_columns(columns)

    cut_prompt, cut_response = row.dialogue.cut is not None, row.answers["chosen"].cut is not None
    ids = columns["prompt_ids"] + columns["response_ids"]
    prompt_tokens, response_tokens = len(row.dialogue.ids), len(row.answers["chosen"].ids)
    assert len(ids) == prompt_tokens + response_tokens
    assert prompt_tokens == prompt_limit if cut_prompt else prompt_tokens <= prompt_limit
    assert response_tokens == response_limit if cut_response else response_tokens <= response_limit

    texts = bytes_of(ids, tokenizer)
    written = FORMATS[name].write(dialogue)
    prompt = expected_bytes(written, sft_loss)[: -len(written[-1][0].encode())]
    response = [(byte, True) for byte in written[-1][0].encode()]
    bos = FORMATS[name].bos is not None and prompt_limit > 1
    start = [(byte, False) for byte in texts[0]] if cut_prompt and bos else []
    kept = sum(map(len, texts[:prompt_tokens])) - len(start)
    expected = (
        start + prompt[len(prompt) - kept :] + response[: sum(map(len, texts[prompt_tokens:]))]
    )
    assert learned_bytes(columns, tokenizer) == unlearned(expected, len(texts[0]))
    if bos:
        assert texts[0] == b"<s>"
    assert (texts[-1] == FORMATS[name].eos.encode()) != cut_response
