"""Answers that are labelled good or bad: records, the part of the reward model, files of KTO."""

from __future__ import annotations

from rlhf_pipeline.data.record_files import examples
from rlhf_pipeline.data.records import Example, Message


def labelled(n: int, label: bool, prompt: str = "Is it") -> Example:
    return Example((Message("user", f"{prompt} {n}?"),), f"It is {n}.", label=label)


def test_only_labelled_examples_make_their_file(write_records, ten):
    """A demonstration and a labelled answer with the same texts have different keys."""
    plain = write_records("plain", *ten)
    assert sorted(path.name for path in plain.glob("*.arrow")) == ["examples.arrow", "texts.arrow"]
    assert "label" not in examples(plain).column_names
    answer = labelled(1, True)
    mixed = examples(write_records("mixed", answer, Example(answer.prompt, answer.chosen)))
    assert mixed.column("id").to_pylist() == ["mixed:1", "mixed:0"]
    assert mixed.column("label").to_pylist() == [None, True]
    assert len({*mixed.column("example_key").to_pylist()}) == 2


def test_labelled_answers_serve_kto_alone(write_records, prepare, load, ten, tokenizer):
    """A good answer is no demonstration, and a labelled prompt is in one part."""
    thumbs = write_records("thumbs", *(labelled(n, n % 2 == 0) for n in range(10)))
    prepare(write_records("pairs", *ten), thumbs)
    for path in ("sft/train.arrow", "ppo/train.arrow", "reward_model/train.arrow"):
        assert load(path) and not any(row["id"].startswith("thumbs") for row in load(path))
    own = load("kto/train.arrow")
    assert len(own) == 8  # two prompts are held out
    for row in own:
        number = int(row["id"].partition(":")[2])
        assert row["label"] == (number % 2 == 0)
        assert tokenizer.decode(row["response_ids"]) == f" It is {number}.<|end|>"


def test_several_sources_may_have_labels(write_records, prepare, load, ten):
    """A judgement that repeats one of an earlier source is merged; the opposite one stays."""
    first = write_records("first", labelled(1, True), *ten[:2])
    second = write_records("second", labelled(1, True), labelled(1, False))
    prepare(first, second, only="reward_model", near_duplicates="keep")
    own = [(row["id"], row["label"]) for row in load("kto/train.arrow")]
    assert [one for one in own if one[0] in ("first:0", "second:0", "second:1")] == [
        ("first:0", True), ("second:1", False),
    ]  # fmt: skip
