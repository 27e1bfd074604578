from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data import tokenization as module
from rlhf_pipeline.data.records import Example, Message, Text
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.data.tokenization import (
    Limited,
    Tokenized,
    corpus,
    encode,
    limited,
    one_ahead,
    tokenize,
)
from rlhf_pipeline.errors import ArtifactError, DataError

PROMPT = "\n\nHuman: Why?\n\nAssistant:"


def batch(*rows: tuple[str, str | None, str | None]) -> list[dict[str, Any]]:
    """Examples own:0, own:1, ...: question, chosen answer, rejected answer."""
    return [
        example(n, [{"role": "user", "content": question}], *answers)
        for n, (question, *answers) in enumerate(rows)
    ]


def example(n: int, prompt: list[dict[str, str]], chosen=None, rejected=None) -> dict[str, Any]:
    return {"id": f"own:{n}", "prompt": prompt, "chosen": chosen, "rejected": rejected}


def tokens(tokenizer, *rows: tuple[str, str | None, str | None]) -> list[Tokenized]:
    contract = TokenContract.of(tokenizer)
    return tokenize(batch(*rows), tokenizer, contract)


def of_texts(
    monkeypatch, tokenizer, contract=None, *, prompt="~", chosen=None, rejected=None, pieces=()
):
    """The tokens of one example with these texts, as if the template had rendered them."""
    given = iter([[chosen], [rejected]])
    monkeypatch.setattr(module, "render_prompts", lambda *_: [prompt])
    monkeypatch.setattr(module, "render_responses", lambda *_: next(given))
    monkeypatch.setattr(module, "render_turns", lambda *_: list(pieces))
    given_example = example(0, [{"role": "user", "content": "~"}] * 3, chosen, rejected)
    contract = contract or TokenContract.of(tokenizer)
    (one,) = tokenize([given_example], tokenizer, contract, turns=[bool(pieces)])
    return one


def limits(prompt: int = 100, response: int = 100, **over_long: str) -> SplitConfig:
    return SplitConfig(
        sources=[{}], max_prompt_tokens=prompt, max_response_tokens=response, **over_long
    )


class TestTexts:
    def test_answers_stay_with_their_prompts(self, tokenizer) -> None:
        rows = ("Why?", "a", "b"), ("Who?", None, None), ("How?", "c", None), ("So?", None, "d")

        def text(ids):
            return ids and tokenizer.decode(ids)

        found = [(one.id, text(one.prompt), text(one.chosen), text(one.rejected), one.turns)
                 for one in tokens(tokenizer, *rows)]  # fmt: skip
        assert found == [
            (f"own:{n}", f"\n\nHuman: {asked}\n\nAssistant:",
             chosen and f" {chosen}<|end|>", rejected and f" {rejected}<|end|>", None)
            for n, (asked, chosen, rejected) in enumerate(rows)
        ]  # fmt: skip


class TestTokenize:
    def test_only_the_template_writes_special_tokens(self, tokenizer) -> None:
        expected = tokens(tokenizer, ("Why?", "Because.", None))
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="$A <|end|>", special_tokens=[("<|end|>", 1)]
        )
        assert tokenizer("a")["input_ids"][-1] == 1
        assert tokens(tokenizer, ("Why?", "Because.", None)) == expected

    @pytest.mark.parametrize("response", ["~", "~<|end|>~", "<|end|>~<|end|>"])
    def test_a_response_has_eos_exactly_once_at_its_end(
        self, tokenizer, monkeypatch, response: str
    ) -> None:
        with pytest.raises(
            ArtifactError, match=r"own:0: expected the EOS id 1 .* exactly once, at the end"
        ):
            of_texts(monkeypatch, tokenizer, rejected=response)

    def test_any_eos_of_the_model_ends_a_response_but_only_one(
        self, tokenizer, monkeypatch
    ) -> None:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot|>"]})
        turn_end = tokenizer.convert_tokens_to_ids("<|eot|>")
        contract = TokenContract.of(tokenizer, [turn_end])

        def tokenized(answer: str) -> list[int]:
            return of_texts(monkeypatch, tokenizer, contract, chosen=answer).chosen

        assert tokenized("~<|eot|>")[-1] == turn_end
        assert tokenized("~<|end|>")[-1] == 1
        with pytest.raises(ArtifactError, match=r"expected the EOS id 1 \('<\|end\|>'\) or \d+ "):
            tokenized("~<|eot|>~<|end|>")

    def test_eos_inside_a_prompt_is_allowed(self, tokenizer, monkeypatch) -> None:
        pieces = [("~<|end|>~<|end|>", False)]
        assert of_texts(monkeypatch, tokenizer, prompt="~<|end|>", pieces=pieces).prompt[-1] == 1


class TestEncode:
    @given(
        st.lists(
            st.text(max_size=20)
            | st.sampled_from(["a<|end|>b", "<|pad|>", " the  week", "\n\nHuman:"])
        )
    )
    @settings(
        max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    def test_equals_a_call_of_the_tokenizer(self, tokenizer, texts: list[str]) -> None:
        expected = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        assert encode(texts, tokenizer) == expected

    def test_truncation_and_padding_settings_of_the_tokenizer_are_ignored(self, tokenizer) -> None:
        tokenizer.backend_tokenizer.enable_truncation(2)
        tokenizer.backend_tokenizer.enable_padding(pad_id=0, length=8)
        tilde = tokenizer.convert_tokens_to_ids("~")
        assert encode(["~~~", "~<|end|>"], tokenizer) == [[tilde, tilde, tilde], [tilde, 1]]
        assert tokenizer(["~~~"], add_special_tokens=False)["input_ids"] == [[tilde, tilde, tilde]]


class TestOneAhead:
    def test_works_while_the_caller_is_busy_and_on_one_item_only(self) -> None:
        taken, done = [], []
        free = threading.Semaphore(0)

        def items():
            for item in range(4):
                taken.append(item)
                yield item

        def function(item: int) -> int:
            assert free.acquire(timeout=600)
            done.append(item)
            return item

        stream = one_ahead(items(), function)
        assert taken == []
        free.release()
        assert next(stream) == (0, 0)
        assert (taken, done) == ([0, 1], [0])  # the second is under way
        free.release()
        assert next(stream) == (1, 1)
        assert (taken, done) == ([0, 1, 2], [0, 1])
        free.release(2)
        assert list(stream) == [(2, 2), (3, 3)]

    def test_an_exception_reaches_the_caller_in_order(self) -> None:
        stream = one_ahead([1, 0, 2], lambda item: 10 // item)
        assert next(stream) == (1, 10)
        with pytest.raises(ZeroDivisionError):
            next(stream)


class TestLimits:
    def test_prompt_at_the_limit_passes_and_one_above_fails(self) -> None:
        assert limited("own:7", "prompt", [5, 6, 7], limits(prompt=3), None) == Limited([5, 6, 7])
        with pytest.raises(DataError) as error:
            limited("own:7", "prompt", [5, 6, 7], limits(prompt=2), None)
        assert str(error.value) == (
            "own:7: the prompt has 3 tokens, more than split.max_prompt_tokens=2. "
            "Fix: raise split.max_prompt_tokens, or set split.over_long_prompts to 'drop' or "
            "'truncate'."
        )

    def test_answer_at_the_limit_passes_and_one_above_fails(self) -> None:
        assert limited("own:7", "chosen", [5, 6, 1], limits(response=3)) == Limited([5, 6, 1])
        with pytest.raises(DataError) as error:
            limited("own:7", "rejected", [5, 6, 1], limits(response=2))
        assert str(error.value) == (
            "own:7: the rejected answer has 3 tokens, more than split.max_response_tokens=2. "
            "Fix: raise split.max_response_tokens, or set split.over_long_responses to 'drop' or "
            "'truncate'."
        )

    def test_a_cut_prompt_keeps_its_end_and_a_cut_answer_its_beginning(self) -> None:
        config = limits(2, 2, over_long_prompts="truncate", over_long_responses="truncate")
        assert limited("own:7", "prompt", [5, 6, 7, 8], config, None) == Limited(
            [7, 8], cut="prompts cut to max_prompt_tokens=2"
        )
        assert limited("own:7", "chosen", [5, 6, 7, 1], config) == Limited(
            [5, 6], cut="chosen answers cut to max_response_tokens=2, which lost their EOS"
        )

    # 9 is BOS.
    @pytest.mark.parametrize(
        ("ids", "limit", "kept"),
        [
            ([9, 5, 6, 7], 3, [9, 6, 7]),
            ([9, 5, 6, 7], 2, [9, 7]),
            ([9, 5, 6, 7], 1, [7]),  # the last token is kept instead of BOS
            ([5, 9, 6, 7], 2, [6, 7]),  # a BOS in another position is an ordinary token
            ([9, 5, 9, 7], 2, [9, 7]),
            ([9, 5], 2, [9, 5]),
        ],
    )
    def test_bos_stays(self, ids: list[int], limit: int, kept: list[int]) -> None:
        assert (
            limited("own:7", "prompt", ids, limits(limit, over_long_prompts="truncate"), 9).ids
            == kept
        )


# --- the corpus of a tokenizer --------------------------------------------------------------------


def test_every_prompt_and_answer_is_read_as_dialogue(write_records) -> None:
    """Of all batches of examples; texts are no part of it."""
    roles = ("system", "user", "assistant", "user")
    said = ("Be kind.", "Why?", "So.", "And?")
    dialogue = tuple(Message(role, text) for role, text in zip(roles, said, strict=True))
    asked = {word: (Message("user", f"{word}?"),) for word in ("Why", "How", "Who")}
    first = write_records(
        "first",
        Example(asked["Why"], "Because.", "No."),
        Example(asked["How"]),
        Example(asked["Who"], "Me."),
    )
    second = write_records("second", Example(dialogue, "Ja.", "Nein."), Text("a document"))
    many = write_records("many", *(Example(asked["Who"], f"{n}.") for n in range(1001)))
    *texts, last = corpus([first, second, write_records("empty"), many])
    assert texts[:6] == [
        "\n\nHuman: Why?\n\nAssistant: Because.",
        "\n\nAssistant: No.",
        "\n\nHuman: How?",
        "\n\nHuman: Who?\n\nAssistant: Me.",
        "Be kind.\n\nHuman: Why?\n\nAssistant: So.\n\nHuman: And?\n\nAssistant: Ja.",
        "\n\nAssistant: Nein.",
    ]
    assert (len(texts), last) == (1006, "\n\nHuman: Who?\n\nAssistant: 1000.")
