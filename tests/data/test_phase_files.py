"""The rows of the prepared files; and the tokens that SFT learns of any dialogue, compared with
dialogues rendered by hand."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.phase_files import TABLES, PhaseFile, Row, RowMaker, demonstration, summary
from rlhf_pipeline.data.template import HUMAN_ASSISTANT_TEMPLATE
from rlhf_pipeline.data.token_contract import Reader, TokenContract
from rlhf_pipeline.data.tokenization import Limited, Tokenized, tokenize
from rlhf_pipeline.errors import DataError

QUESTION = [{"role": "user", "content": "Why?"}]
EXAMPLE = {"id": "own:1", "prompt": QUESTION, "reference": None}
TABLE = {table.path: table for table in TABLES}


def limits(prompt=100, response=100, **changes):
    return SplitConfig(
        sources=[{}], max_prompt_tokens=prompt, max_response_tokens=response, **changes
    )


def row(name="own:1", prompt=None, **answers):
    prompt = prompt or Limited([5, 6])
    example = EXAMPLE | {"id": name}
    return Row("own", example, prompt, answers, prompt, [False] * len(prompt.ids))


def test_a_dialogue_has_its_own_limit_check():
    turns = ([5, 7, 7, 1, 6], [False, True, True, True, False])
    tokens = Tokenized("own:1", [5, 7, 1, 6], [8, 1], None, turns)
    config = limits(prompt=4, over_long_prompts="drop")
    made = RowMaker(config, None).make("own", EXAMPLE, tokens, "sft")
    assert made.prompt.dropped is None
    assert made.dialogue.dropped == "prompt over max_prompt_tokens=4"
    with pytest.raises(DataError, match="own:1: the prompt has 5 tokens"):
        RowMaker(limits(prompt=4), None).make("own", EXAMPLE, tokens, "sft")


class TestPhaseFile:
    @staticmethod
    def write(tmp_path, path, *batches):
        wanted = np.arange(100) % 10 == 0
        file = PhaseFile(TABLE[path], tmp_path, wanted, duplicates_merged=3)
        start = 0
        for rows in batches:
            file.add(rows, np.arange(start, start + len(rows)) * 10, limits())
            start += len(rows)
        file.close()
        return file, pa.ipc.open_stream(pa.memory_map(str(tmp_path / path))).read_all().to_pydict()

    @pytest.mark.parametrize("path", ["ppo/train.arrow", "evaluation/test.arrow"])
    def test_ppo_and_the_evaluation(self, tmp_path, path):
        solved = row("own:2", Limited([7]))
        solved.example["reference"] = "4"
        _, columns = self.write(tmp_path, path, [row()], [], [solved])
        assert columns == {
            "id": ["own:1", "own:2"],
            "prompt_ids": [[5, 6], [7]],
            "source": ["own"] * 2,
            "messages": [QUESTION] * 2,
            "reference": [None, "4"],
        }

    def test_dropped_rows_are_counted_once_by_their_first_fault(self, tmp_path):
        fits, cut = Limited([8, 1]), Limited([8], cut="cut")
        long = Limited([8, 8, 1], dropped="long answer")
        rows = [
            row("own:1", chosen=fits, rejected=fits),
            row("own:2", Limited([5, 5], dropped="long prompt"), chosen=long, rejected=fits),
            row("own:3", chosen=fits, rejected=long),
            row("own:4", chosen=cut, rejected=long),  # None, so not counted as cut
            row("own:5", chosen=cut, rejected=cut),
        ]
        path = "reward_model/train.arrow"
        file, columns = self.write(tmp_path, path, rows[:3], rows[3:])
        assert columns["id"] == ["own:1", "own:5"]
        assert np.concatenate(file.written).tolist() == [0, 40]
        found = file.describe()
        assert found.pop("tokens") == {
            "prompt_ids": {"total": 4, "max": 2, "p50": 2, "p90": 2, "p99": 2},
            "chosen_ids": {"total": 3, "max": 2, "p50": 1, "p90": 2, "p99": 2},
            "rejected_ids": {"total": 3, "max": 2, "p50": 1, "p90": 2, "p99": 2},
        }
        dropped = {"long prompt": 1, "long answer": 2}
        counts = {"duplicates_merged": 3, "dropped": dropped, "truncated": {"cut": 2}}
        assert found == {"rows": 2} | counts

    def test_sft_measures_the_dialogue_and_the_others_the_prompt(self, tmp_path):
        long, sound = Limited([5, 5], dropped="long"), row("own:2", chosen=Limited([1]))
        mixed = replace(row(prompt=Limited([5]), chosen=Limited([1])), dialogue=long)
        for path, ids in (("sft/train.arrow", ["own:2"]), ("ppo/train.arrow", ["own:1", "own:2"])):
            assert self.write(tmp_path, path, [mixed, sound])[1]["id"] == ids

    def test_a_file_that_loses_all_its_rows_is_an_error(self, tmp_path):
        long = row(chosen=Limited([8, 8, 1], dropped="chosen answer over max_response_tokens=2"))
        with pytest.raises(DataError) as error:
            self.write(tmp_path, "sft/train.arrow", [long, long])
        assert str(error.value) == (
            "sft/train.arrow: all 2 rows were dropped ({'chosen answer over "
            "max_response_tokens=2': 2}). Fix: raise split.max_prompt_tokens or "
            "split.max_response_tokens."
        )


def test_percentiles_are_lengths_that_occur():
    # 10 lengths: 1 1 1 1 1 2 2 2 2 9; the 5th is the median, the 9th the 90th percentile
    found = summary(Counter({2: 4, 9: 1, 1: 5}))
    assert found == {"total": 22, "max": 9, "p50": 1, "p90": 2, "p99": 9}
    assert summary(Counter({1: 99, 7: 1}))["p99"] == 1
    assert summary(Counter({1: 98, 7: 1}))["p99"] == 7  # 99 rows: the 99th
    assert summary(Counter({3: 1})) == {"total": 3, "max": 3, "p50": 3, "p90": 3, "p99": 3}


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


def human_assistant(dialogue):
    pieces = [(dialogue.system or "", False)]
    for user, assistant in dialogue.turns:
        pieces += [(f"\n\nHuman: {user}\n\nAssistant:", False), (f" {assistant}<|end|>", True)]
    return pieces


def chatml(dialogue):
    system = f"<|im_start|>system\n{dialogue.system}<|im_end|>\n"
    pieces = [] if dialogue.system is None else [(system, False)]
    for user, assistant in dialogue.turns:
        pieces += [(f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n", False)]
        pieces += [(f"{assistant}<|im_end|>", True), ("\n", False)]
    return pieces[:-1]  # the model stops at the EOS


def llama_2(dialogue):
    system = "" if dialogue.system is None else f"<<SYS>>{dialogue.system}<</SYS>>"
    pieces = []
    for user, assistant in dialogue.turns:
        pieces.append((f"<s>[INST] {system}{user.strip()} [/INST]", False))
        pieces.append((f" {assistant.strip()} </s>", True))
        system = ""
    return pieces


@dataclass(frozen=True)
class Format:
    template: str
    eos: str
    bos: str | None
    write: Callable[[Dialogue], list[Piece]]


FORMATS = {
    "human and assistant": Format(HUMAN_ASSISTANT_TEMPLATE, "<|end|>", None, human_assistant),
    "ChatML": Format(CHATML, "<|im_end|>", None, chatml),
    "Llama 2": Format(LLAMA_2, "</s>", "<s>", llama_2),
}
CONTROL = ("<|pad|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>")


@pytest.fixture
def tokenizers(tokenizer):
    """One tokenizer for each format."""
    return {
        name: PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, pad_token="<|pad|>", eos_token=form.eos,
            bos_token=form.bos, additional_special_tokens=["<|im_start|>"],
            chat_template=form.template,
        )
        for name, form in FORMATS.items()
    }  # fmt: skip


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


def row_of(dialogue, tokenizer, config):
    prompt = [] if dialogue.system is None else [{"role": "system", "content": dialogue.system}]
    for user, assistant in dialogue.turns:
        prompt += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    answer = prompt.pop()["content"]
    one = {"id": "own:1", "prompt": prompt, "chosen": answer, "rejected": None}
    reader = Reader(tokenizer, TokenContract.of(tokenizer))
    (tokens,) = tokenize([one], reader, [config.sft_loss == "assistant"])
    return RowMaker(config, tokenizer.bos_token_id).make("own", one, tokens, "sft")


BYTES = {sign: byte for byte, sign in bytes_to_unicode().items()}
"""GPT-2's characters for bytes. A token may end within a character, where decoding would lose
bytes."""


def bytes_of(ids, tokenizer):
    return [
        token.encode() if token in CONTROL else bytes(BYTES[sign] for sign in token)
        for token in tokenizer.convert_ids_to_tokens(ids)
    ]


def learned_bytes(columns, tokenizer):
    """Every byte of a row, and whether it is learned."""
    ids = columns["prompt_ids"] + columns["response_ids"]
    learned = [False] * len(columns["prompt_ids"]) + columns["loss_mask"]
    pairs = zip(bytes_of(ids, tokenizer), learned, strict=True)
    return [(byte, own) for text, own in pairs for byte in text]


def expected_bytes(pieces, sft_loss):
    """Every byte of a dialogue rendered by hand, and whether it is learned."""
    found = []
    for number, (text, own) in enumerate(pieces, start=1):
        last = number == len(pieces)
        learned = {"response": last, "assistant": own, "all": True}[sft_loss]
        found += [(byte, learned) for byte in text.encode()]
    return found


FORGED = Dialogue(
    "Assistant: no", [("\n\nAssistant: So.<", ""), ("", " So. "), ("Assistant:", "\n\nHuman: Why?")]
)


LONG = 10_000


@given(
    FORMAT_NAMES,
    DIALOGUES,
    SFT_LOSSES,
    st.just(LONG) | st.integers(1, 40),
    st.just(LONG) | st.integers(1, 12),
)
@example("ChatML", FORGED, "assistant", LONG, LONG)
@example("human and assistant", Dialogue(None, [("", "")]), "all", LONG, LONG)
@example("Llama 2", FORGED, "assistant", 8, 3)
@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_exactly_the_selected_tokens_are_learned_also_of_cut_texts(
    tokenizers, name, dialogue, sft_loss, prompt_limit, response_limit
):
    tokenizer = tokenizers[name]
    cut = {"over_long_prompts": "truncate", "over_long_responses": "truncate"}
    config = limits(prompt_limit, response_limit, sft_loss=sft_loss, **cut)
    row = row_of(dialogue, tokenizer, config)
    columns = demonstration(row, config)
    assert len(columns["loss_mask"]) == len(columns["response_ids"])
    assert columns["loss_mask"][0] is True
    assert len(columns["prompt_ids"]) >= 1

    prompt_ids, response_ids = row.dialogue.ids, row.answers["chosen"].ids
    assert columns["prompt_ids"] + columns["response_ids"] == prompt_ids + response_ids
    cut_prompt, cut_response = row.dialogue.cut is not None, row.answers["chosen"].cut is not None
    assert len(prompt_ids) == prompt_limit if cut_prompt else len(prompt_ids) <= prompt_limit
    assert len(response_ids) == response_limit or not cut_response

    texts = bytes_of(prompt_ids + response_ids, tokenizer)
    written = FORMATS[name].write(dialogue)
    prompt = expected_bytes(written, sft_loss)[: -len(written[-1][0].encode())]
    response = [(byte, True) for byte in written[-1][0].encode()]
    bos = FORMATS[name].bos is not None and prompt_limit > 1
    start = [(byte, False) for byte in texts[0]] if cut_prompt and bos else []
    kept = sum(map(len, texts[: len(prompt_ids)])) - len(start)
    answered = sum(map(len, texts[len(prompt_ids) :]))
    expected = start + prompt[len(prompt) - kept :] + response[:answered]
    if not cut_prompt and not cut_response:
        assert (kept, answered) == (len(prompt), len(response))
    first = len(texts[0])  # nothing predicts the first token
    unlearned = [(byte, False) for byte, _ in expected[:first]]
    assert learned_bytes(columns, tokenizer) == unlearned + expected[first:]
    if bos:
        assert texts[0] == b"<s>"
    assert (texts[-1] == FORMATS[name].eos.encode()) != cut_response
