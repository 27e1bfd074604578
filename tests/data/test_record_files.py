from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from rlhf_pipeline.data import record_files
from rlhf_pipeline.data.record_files import (
    ArrowWriter,
    example_rows,
    examples,
    keys,
    mapped,
    serves,
    texts,
)
from rlhf_pipeline.data.records import Example, Message, RowCounts, Text, Unused
from rlhf_pipeline.errors import DataError


def asked(content, *answers):
    return Example((Message("user", content),), *answers)


DIALOGUE = (
    Message("system", "Be kind."),
    Message("user", "Grüße, 世界 🙂"),
    Message("assistant", "Hello."),
    Message("user", "Why?"),
)


def test_records_are_read_back_unchanged(write_records):
    rows = Example(DIALOGUE, "Ja.\n", " No"), asked("a", "b"), replace(asked("c"), reference="4")
    folder = write_records("mixed", *rows)
    (batch,) = examples(folder).to_batches()
    assert example_rows(batch) == [
        {
            "id": f"mixed:{number}",
            "prompt": [{"role": turn.role, "content": turn.content} for turn in row.prompt],
            "chosen": row.chosen,
            "rejected": row.rejected,
            "reference": row.reference,
        }
        for number, row in enumerate(rows)
    ]
    assert list(texts(folder)) == []
    folder = write_records("texts", Text("One.\n"), Text("二"))
    assert list(texts(folder)) == [(["texts:0", "texts:1"], ["One.\n", "二"])]


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
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    assert first[0] == {"role": "user", "content": "1 + 2?"} | {
        "tools": [{"name": "add"}, {"name": "find"}]
    }
    assert [other[:2] for other in others] == [[{"role": "user", "content": "1 + 2?"}, call]] * 2
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
    folder = write_records(
        "keys",
        asked("Why?", "Yes.", "No."),
        asked(" WHY? ", "Yes.\n", " No."),  # equal except for case and surrounding white space
        asked("Why?", "yes.", "No."),  # the case of an answer counts
        asked("Why?", "No.", "Yes."),
        asked("Why?", "Yes."),
        asked("Why?"),
        asked("How?", "Yes.", "No."),
    )
    table = examples(folder)
    prompts, whole = keys(table, "prompt_key"), keys(table, "example_key")
    assert prompts.dtype == np.uint8
    # printf '10:user: why?' | sha256sum; the parts of an example are the prompt and both answers,
    # stripped: printf '10:user: why?4:Yes.3:No.' | sha256sum; an answer that is
    # missing is an empty part: '...4:Yes.0:'.
    assert [bytes(row).hex() for row in prompts] == ["d4b31de3f816d97ecec6762c2001cf8d"] * 6 + [
        "5dbaee0c7b721072c1f6f0d126edfa98"
    ]
    assert [bytes(row).hex() for row in whole] == [
        "18337d63dc4ef37ce696a58684dd6016",
        "18337d63dc4ef37ce696a58684dd6016",
        "73c04afe4bd1b9f55d27e8700f89a62c",
        "4340a8ab155b87df92492f8b2cb24f23",
        "7cba3f96e5c9af3b29baf9c38fb62319",
        "47b130cd2526477fecd8751c4f6dde72",
        "0e609e01bbd8e713eb0f6e1085cd5226",
    ]


SCHEMA = pa.schema([("id", pa.string()), ("prompt_ids", pa.list_(pa.int32()))])


def write(path, *batches):
    writer = ArrowWriter(path, SCHEMA)
    for batch in batches:
        writer.write(batch)
    writer.close()
    return path.read_bytes()


def test_batches_are_read_back_in_order_and_equal_ones_are_equal_bytes(tmp_path):
    first = [{"id": "a", "prompt_ids": [1, 2]}, {"id": "b", "prompt_ids": [], "more": 1}]
    batches = first, [{"id": "c", "prompt_ids": [3]}]
    assert write(tmp_path / "one.arrow", *batches) == write(tmp_path / "two.arrow", *batches)
    table = mapped(tmp_path / "one.arrow")
    assert table.to_pydict() == {"id": ["a", "b", "c"], "prompt_ids": [[1, 2], [], [3]]}
    write(tmp_path / "none.arrow")
    assert mapped(tmp_path / "none.arrow").schema == table.schema == SCHEMA


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
            ("own.jsonl:1", EMPTY.reason), ("own.jsonl:3", EQUAL.reason),
            ("own.jsonl:4", EMPTY.reason),
        ],
    )  # fmt: skip
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
