import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data import tokenization
from rlhf_pipeline.data.records import Example, Message, RowCounts, Text
from rlhf_pipeline.data.token_contract import Reader, TokenContract
from rlhf_pipeline.data.tokenization import Limited, encode, limited, one_ahead, tokenize
from rlhf_pipeline.errors import ArtifactError, DataError


def batch(*rows):
    """Examples own:0, own:1, ...: question, chosen answer, rejected answer."""
    return [
        {"id": f"own:{n}", "prompt": [{"role": "user", "content": question}], "chosen": chosen,
         "rejected": rejected}
        for n, (question, chosen, rejected) in enumerate(rows)
    ]  # fmt: skip


def tokens(tokenizer, *rows):
    return tokenize(batch(*rows), Reader(tokenizer, TokenContract.of(tokenizer)))


def limits(prompt=100, response=100, **over_long):
    return SplitConfig(
        sources=[{}], max_prompt_tokens=prompt, max_response_tokens=response, **over_long
    )


class TestTokenize:
    def test_answers_stay_with_their_prompts(self, tokenizer):
        rows = ("Why?", "a", "b"), ("Who?", None, None), ("How?", "c", None), ("So?", None, "d")

        for n, (one, row) in enumerate(zip(tokens(tokenizer, *rows), rows, strict=True)):
            assert (one.id, one.turns) == (f"own:{n}", None)
            assert tokenizer.decode(one.prompt) == f"\n\nHuman: {row[0]}\n\nAssistant:"
            for ids, answer in ((one.chosen, row[1]), (one.rejected, row[2])):
                assert (ids and tokenizer.decode(ids)) == (answer and f" {answer}<|end|>")

    def test_only_the_template_writes_special_tokens(self, tokenizer):
        expected = tokens(tokenizer, ("Why?", "Because.", None))
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="$A <|end|>", special_tokens=[("<|end|>", 1)]
        )
        assert tokenizer("a")["input_ids"][-1] == 1
        assert tokens(tokenizer, ("Why?", "Because.", None)) == expected

    def test_a_response_has_one_eos_at_its_end_which_a_prompt_may_have_anywhere(self, tokenizer):
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot|>"]})
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        turn_end = tokenizer.convert_tokens_to_ids("<|eot|>")
        contract = TokenContract.of(tokenizer, [turn_end])

        def last_ids(answer):
            (one,) = tokenize(batch(("~<|end|>", answer, None)), Reader(tokenizer, contract))
            return one.prompt[-1], one.chosen[-1]

        assert last_ids("~<|eot|>") == (1, turn_end)
        assert last_ids("~<|end|>") == last_ids("~") == (1, 1)
        message = r"own:0: expected the EOS id 1 .* or \d+ .* exactly once, at the end"
        for answer in ("~<|eot|>~<|end|>", "<|end|>~<|end|>"):
            with pytest.raises(ArtifactError, match=message):
                last_ids(answer)


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
    def test_equals_a_call_of_the_tokenizer(self, tokenizer, texts):
        expected = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        assert encode(texts, tokenizer) == expected

    def test_truncation_and_padding_settings_of_the_tokenizer_are_ignored(self, tokenizer):
        tokenizer.backend_tokenizer.enable_truncation(2)
        tokenizer.backend_tokenizer.enable_padding(pad_id=0, length=8)
        tilde = tokenizer.convert_tokens_to_ids("~")
        assert encode(["~~~", "~<|end|>"], tokenizer) == [[tilde, tilde, tilde], [tilde, 1]]
        assert tokenizer(["~~~"], add_special_tokens=False)["input_ids"] == [[tilde, tilde, tilde]]


class TestOneAhead:
    def test_works_while_the_caller_is_busy_and_on_one_item_only(self):
        taken, free = [], threading.Semaphore(0)

        def items():
            for item in range(4):
                taken.append(item)
                yield item

        stream = one_ahead(items(), lambda item: free.acquire(timeout=600) and -item)
        assert taken == []
        for item in range(2):
            free.release()
            assert next(stream) == (item, -item)
            assert taken == [*range(item + 2)]  # the next one is under way
        free.release(2)
        assert list(stream) == [(2, -2), (3, -3)]

    def test_an_exception_reaches_the_caller_in_order(self):
        stream = one_ahead([1, 0, 2], lambda item: 10 // item)
        assert next(stream) == (1, 10)
        with pytest.raises(ZeroDivisionError):
            next(stream)


@pytest.mark.parametrize(
    ("text", "ids", "expected"),
    [
        ("prompt", [5, 6, 7], Limited([5, 6, 7])),
        ("prompt", [5, 6, 7, 8], Limited([6, 7, 8], cut="prompts cut to max_prompt_tokens=3")),
        ("chosen", [5, 1], Limited([5, 1])),
        ("chosen", [5, 6, 1], Limited(
            [5, 6], cut="chosen answers cut to max_response_tokens=2, which lost their EOS")),
        # 9 is BOS, which stays; in another position it is an ordinary token.
        ("prompt", [9, 5, 6, 7], Limited([9, 6, 7], cut="prompts cut to max_prompt_tokens=3")),
        ("prompt", [9, 5, 9, 7], Limited([9, 9, 7], cut="prompts cut to max_prompt_tokens=3")),
    ],
)  # fmt: skip
def test_a_text_above_its_limit_is_cut_dropped_or_refused(text, ids, expected):
    config = limits(3, 2, over_long_prompts="truncate", over_long_responses="truncate")
    assert limited("own:7", text, ids, config, 9) == expected
    # Of one token, the last is kept instead of BOS.
    one = limits(prompt=1, over_long_prompts="truncate")
    assert limited("own:7", "prompt", ids, one, 9).ids == ids[-1:]
    dropping = limits(3, 2, over_long_prompts="drop", over_long_responses="drop")
    if expected.cut is None:
        assert limited("own:7", text, ids, limits(3, 2), 9) == expected
        return
    assert limited("own:7", text, ids, dropping, 9).dropped.endswith(f"_tokens={len(expected.ids)}")
    with pytest.raises(DataError) as error:
        limited("own:7", text, ids, limits(3, 2), 9)
    kind, what = ("prompt", "prompt") if text == "prompt" else ("response", "chosen answer")
    limit = f"split.max_{kind}_tokens"
    assert str(error.value) == (
        f"own:7: the {what} has {len(ids)} tokens, more than {limit}={len(expected.ids)}. "
        f"Fix: raise {limit}, or set split.over_long_{kind}s to 'drop' or 'truncate'."
    )


def test_every_prompt_and_answer_is_read_as_dialogue(write_records):
    """Of all batches of examples; texts are no part of it."""
    said = {"system": "Be kind.", "user": "Why?", "assistant": "So."}
    dialogue = (*(Message(*turn) for turn in said.items()), Message("user", "And?"))
    why, how, who = ((Message("user", f"{word}?"),) for word in ("Why", "How", "Who"))
    examples = Example(why, "Because.", "No."), Example(how), Example(who, "Me.")
    first = write_records("first", *examples)
    second = write_records("second", Example(dialogue, "Ja.", "Nein."), Text("a document"))
    many = write_records("many", *(Example(who, f"{n}.") for n in range(1001)))
    *texts, last = tokenization.corpus([first, second, write_records("empty"), many])
    assert texts[:6] == [
        "\n\nHuman: Why?\n\nAssistant: Because.",
        "\n\nAssistant: No.",
        "\n\nHuman: How?",
        "\n\nHuman: Who?\n\nAssistant: Me.",
        "Be kind.\n\nHuman: Why?\n\nAssistant: So.\n\nHuman: And?\n\nAssistant: Ja.",
        "\n\nAssistant: Nein.",
    ]
    assert (len(texts), last) == (1006, "\n\nHuman: Who?\n\nAssistant: 1000.")


def controls(tokenizer):
    return tokenization.control_tokens(tokenizer, TokenContract.of(tokenizer))


def test_control_tokens(tokenizer):
    tokenizer.add_tokens(["penguin"])
    assert controls(tokenizer) == {"<|pad|>", "<|end|>"}
    tokenizer.add_special_tokens({"unk_token": "<unk>", "additional_special_tokens": ["<|turn|>"]})
    assert controls(tokenizer) == {"<|pad|>", "<|end|>", "<|turn|>"}
    contract = TokenContract.of(tokenizer, [1, tokenizer.unk_token_id])  # as in Qwen2.5
    assert "<unk>" in tokenization.control_tokens(tokenizer, contract)
    tokenizer.unk_token = "<|end|>"  # GPT-2's unknown token is its EOS
    assert "<|end|>" in controls(tokenizer)
    assert tokenization.any_of([]).search("any text") is None


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["Why?", "", "<|END|> < |end|>", "[SEP] [S...", "So."], None),
        (["<|end|>", "", ""], "<|end|>"),
        (["a", "b<|end|>c", ""], "<|end|>"),
        (["a", "b", "c\n<|end|>"], "<|end|>"),
        (["<|pad|><|end|>", "<|end|>"], "<|pad|>"),  # a row counts once, by its first token
        (["<|end|>|>"], "<|end|>|>"),  # the longest
        (["a[SEP].*b"], "[SEP].*"),  # no regular expression
    ],
)
def test_a_control_token_anywhere_is_a_bad_row(tokenizer, texts, found):
    added = ["<|end", "<|end|>|>", "[SEP].*"]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    counts, reader = RowCounts(rows=4), Reader(tokenizer, TokenContract.of(tokenizer))
    control_filter = tokenization.ControlTokenFilter([reader], max_bad_fraction=1.0)
    assert control_filter.accepts("own", counts, "own:1", texts) == (found is None)
    reason = f"the text contains the tokenizer's control token {found}"
    assert counts.first_bad == ([] if found is None else [("own:1", reason)])
    assert counts.bad.total() == len(counts.first_bad)
