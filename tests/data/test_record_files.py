from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from rlhf_pipeline.data import record_files
from rlhf_pipeline.data.record_files import example_rows, examples, keys, serves
from rlhf_pipeline.data.records import Example, Message, RowCounts, Text, Unused
from rlhf_pipeline.errors import DataError


def asked(content, *answers, **further):
    return Example((Message("user", content),), *answers, **further)


def test_records_are_read_back_unchanged(write_records):
    said = {"system": "Be kind.", "user": "Grüße, 世界 🙂", "assistant": "Hello."}
    dialogue = (*(Message(*turn) for turn in said.items()), Message("user", "Why?"))
    rows = Example(dialogue, "Ja.\n", " No"), asked("a", "b"), asked("c", reference="4")
    folder = write_records("mixed", *rows)
    (batch,) = examples(folder).to_batches()
    assert example_rows(batch) == [
        {"id": f"mixed:{number}", "chosen": row.chosen, "rejected": row.rejected,
         "reference": row.reference,
         "prompt": [{"role": turn.role, "content": turn.content} for turn in row.prompt]}
        for number, row in enumerate(rows)
    ]  # fmt: skip
    assert list(record_files.texts(folder)) == []
    folder = write_records("texts", Text("One.\n"), Text("二"))
    assert list(record_files.texts(folder)) == [(["texts:0", "texts:1"], ["One.\n", "二"])]


def test_schemas_and_calls_of_tools_come_back_in_the_messages(write_records):
    called = Message("assistant", "", '{"tool_calls": [{"name": "add"}]}')
    prompt = (*asked("1 + 2?").prompt, called, Message("tool", "3"))
    with_tools = Example(prompt, "3.", tools='[{"name": "add"}, {"name": "find"}]')
    good = replace(with_tools, label=True, tools=None)
    rows = with_tools, asked("a", "b"), good, replace(with_tools, tools=None)
    folder = write_records("tools", *rows)
    found = [row for batch in examples(folder).to_batches() for row in example_rows(batch)]
    assert [row["id"] for row in found] == [f"tools:{n}" for n in (1, 0, 2, 3)]
    _, first, *others = [row["prompt"] for row in found]
    question = {"role": "user", "content": "1 + 2?"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    assert first[0] == question | {"tools": [{"name": "add"}, {"name": "find"}]}
    assert [other[:2] for other in others] == [[question, call]] * 2
    assert first[1:] == others[0][1:]
    assert len({*examples(folder).column("prompt_key").to_pylist()}) == 3
    assert serves(examples(folder)).tolist() == [1, 1, 2, 1]


def test_phases_that_can_use_each_example(write_records, monkeypatch):
    """PPO is bit 2, the reward model 1, SFT 0. A true answer makes a demonstration serve PPO."""
    monkeypatch.setattr(record_files, "_BATCH_ROWS", 2)
    plain = asked("a"), asked("a", "b"), asked("a", "b", "c")
    rows = [*plain, *(replace(row, reference="b") for row in plain)]
    bits = serves(examples(write_records("rows", *rows, replace(rows[4], label=True))))
    assert bits.dtype == np.uint8
    assert bits.tolist() == [0b100, 0b001, 0b111, 0b100, 0b101, 0b111, 0b010]


def test_keys_of_prompts_and_examples(write_records, monkeypatch):
    monkeypatch.setattr(record_files, "_BATCH_ROWS", 3)
    # printf '10:user: why?' | sha256sum; the parts of an example are the prompt and both answers,
    # stripped: printf '10:user: why?4:Yes.3:No.' | sha256sum; an answer that is
    # missing is an empty part: '...4:Yes.0:'.
    why, how = "d4b31de3f816d97ecec6762c2001cf8d", "5dbaee0c7b721072c1f6f0d126edfa98"
    rows = [
        (asked("Why?", "Yes.", "No."), "18337d63dc4ef37ce696a58684dd6016"),
        # Case of the prompt and surrounding white space do not count, the case of an answer does.
        (asked(" WHY? ", "Yes.\n", " No."), "18337d63dc4ef37ce696a58684dd6016"),
        (asked("Why?", "yes.", "No."), "73c04afe4bd1b9f55d27e8700f89a62c"),
        (asked("Why?", "No.", "Yes."), "4340a8ab155b87df92492f8b2cb24f23"),
        (asked("Why?", "Yes."), "7cba3f96e5c9af3b29baf9c38fb62319"),
        (asked("Why?"), "47b130cd2526477fecd8751c4f6dde72"),
        (asked("How?", "Yes.", "No."), "0e609e01bbd8e713eb0f6e1085cd5226"),
    ]
    table = examples(write_records("keys", *(row for row, _ in rows)))
    prompts, whole = keys(table, "prompt_key"), keys(table, "example_key")
    assert prompts.dtype == np.uint8
    assert [bytes(key).hex() for key in prompts] == [why] * 6 + [how]
    assert [bytes(key).hex() for key in whole] == [key for _, key in rows]


SCHEMA = pa.schema([("id", pa.string()), ("prompt_ids", pa.list_(pa.int32()))])


def write(path, *batches):
    writer = record_files.ArrowWriter(path, SCHEMA)
    for batch in batches:
        writer.write(batch)
    writer.close()
    return path.read_bytes()


def test_batches_are_read_back_in_order_and_equal_ones_are_equal_bytes(tmp_path):
    first = [{"id": "a", "prompt_ids": [1, 2]}, {"id": "b", "prompt_ids": [], "more": 1}]
    batches = first, [{"id": "c", "prompt_ids": [3]}]
    assert write(tmp_path / "one.arrow", *batches) == write(tmp_path / "two.arrow", *batches)
    table = record_files.mapped(tmp_path / "one.arrow")
    assert table.to_pydict() == {"id": ["a", "b", "c"], "prompt_ids": [[1, 2], [], [3]]}
    write(tmp_path / "none.arrow")
    assert record_files.mapped(tmp_path / "none.arrow").schema == table.schema == SCHEMA


EMPTY, TIE = Unused("the chosen answer is empty"), Unused("a tie", bad=False)
EQUAL = Unused("the answers are equal: „ja“")


def counted(*rows, total):
    counts = RowCounts(rows=total)
    for line, row in enumerate(rows, start=1):
        counts.add_unused(f"own.jsonl:{line}", row)
    return counts


def test_counts_by_reason_are_written_and_read_and_continue(tmp_path):
    counted(EMPTY, TIE, EQUAL, EMPTY, TIE, TIE, total=10).write(tmp_path)
    counts = RowCounts.read(tmp_path)
    assert counts == RowCounts(
        rows=10,
        bad={EMPTY.reason: 2, EQUAL.reason: 1},
        skipped={"a tie": 3},
        first_bad=[
            (f"own.jsonl:{n}", each.reason) for n, each in ((1, EMPTY), (3, EQUAL), (4, EMPTY))
        ],
    )
    counts.add_unused("own.jsonl:8", EMPTY)
    assert (counts.bad.total(), len(counts.first_bad)) == (4, 4)


@pytest.mark.parametrize(
    ("rows", "total", "allowed", "fix"),
    [
        ([EMPTY] * 6, 16, 0.375, r"set split\.max_bad_fraction to at least 0\.375 to leave bad"),
        ([EMPTY], 3, 0.334, r"at least 0\.334 "),  # a third, rounded upwards
        ([EMPTY] * 29, 100, 0.29, r"at least 0\.29 "),  # 0.29 * 100 is 28.999999999999996
        # Most rows: the column map is suspected, and no fraction is advised.
        ([EMPTY] * 6, 10, 0.6, r"correct the source's `columns` or the file: most rows are bad\.$"),
        ([Unused("not UTF-8")], 10, 0.1, r"convert the file, for example: iconv .* NEW_FILE$"),
        ([Unused("not UTF-8")] * 9, 10, 0.9, r"convert the file, for example: iconv "),
    ],
)  # fmt: skip
def test_too_many_bad_rows_are_an_error_with_the_first_three(rows, total, allowed, fix):
    counts = counted(*rows, total=total)
    counts.check_bad_fraction(allowed, "mine")
    with pytest.raises(DataError, match=f"Fix: .*{fix}") as error:
        counts.check_bad_fraction(0.0, "mine")
    first, *places, _ = str(error.value).splitlines()
    assert first.startswith(f"source mine: {len(rows)} of {total} rows are bad, more than split")
    assert places == [f"  own.jsonl:{n + 1}: {row.reason}" for n, row in enumerate(rows[:3])]
    with pytest.raises(DataError):
        counts.check_bad_fraction(len(rows) / total - 1e-9, "mine")
