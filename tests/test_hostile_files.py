"""Files that nobody made by mistake: a message or unused rows, in bounded memory and time."""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_pipeline.data.record_files import RecordsWriter
from rlhf_pipeline.data.records import Example, Message, Text
from rlhf_pipeline.runtime.job import checkpoint_path, seal
from rlhf_pipeline.runtime.manifest import Manifest, file_entries

pytestmark = pytest.mark.slow

READER = Path(__file__).with_name("hostile_reader.py")
MIB = 2**20
LIMIT_MIB = 1024


@pytest.fixture(scope="module")
def readers() -> Iterator[Callable[[bool], subprocess.Popen[str]]]:
    """The processes that read rows and those that read models, each started once."""
    with ExitStack() as running:

        @cache
        def reader(models: bool) -> subprocess.Popen[str]:
            command = [sys.executable, str(READER), *["models"] * models]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            return running.enter_context(subprocess.Popen(command, text=True, **pipes))

        yield reader


Check = Callable[[str, dict[str, Path], int], None]


@pytest.fixture
def check(readers: Callable[[bool], subprocess.Popen[str]]) -> Check:
    """Checks that every file of a kind ends in a message, within the limits."""

    def check(kind: str, files: dict[str, Path], expected: int) -> None:
        assert len(files) == expected
        reader, faults = readers(kind in ("model", "table")), {}
        for name, path in files.items():
            print(json.dumps((kind, str(path))), file=reader.stdin, flush=True)
            found = json.loads(reader.stdout.readline())
            in_memory = found["mib"] <= LIMIT_MIB
            stack = "Traceback" in found["message"]
            if found["code"] != 0 or not found["message"] or stack or not in_memory:
                faults[name] = found
        assert faults == {}

    return check


def bomb(piece: bytes, mib: int, begin: bytes = b"") -> bytes:
    """A compressed file of equal pieces; 1000 times smaller than its content. Its end is cut."""
    packer = zlib.compressobj(9, wbits=31)
    packed = packer.compress(begin) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(piece * (MIB // len(piece))) + packer.flush(zlib.Z_FULL_FLUSH)
    return packed + block * mib


def archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("../../outside.jsonl", b'{"x": 1}\n' * 100_000)
    return file.getvalue()


ROW = b'{"prompt": "a", "chosen": "b"}\n'
DEEP = 200_000


def lines() -> dict[str, bytes]:
    """JSON Lines."""
    packed = gzip.compress(ROW * 1000)
    return {
        "nul.jsonl": b"\0" * MIB,
        "utf16.jsonl": (ROW.decode() * 3).encode("utf-16"),
        "deep.jsonl": b'{"x": ' + b"[" * DEEP + b"]" * DEEP + b"}\n",
        "deep-objects.jsonl": b'{"x":' * DEEP + b"1" + b"}" * DEEP + b"\n",
        "long.jsonl": b'{"x": "' + b"a" * (40 * MIB) + b'"}\n',
        "long-wide.jsonl": '{"x": "\U0001f600'.encode() + b"a" * (40 * MIB) + b'"}\n',
        "objects.jsonl": b'{"x": [' + b"{}," * (12 * MIB) + b"{}]}\n",
        "near-limit.jsonl": b'{"x": [' + b"{}," * (5 * MIB) + b"{}]\n",
        "zip.jsonl": archive(),
        "cut.jsonl": b'{"prompt": "a", "cho',
        "cut.jsonl.gz": packed[: len(packed) // 2],
        "checksum.jsonl.gz": packed[:-8] + b"\0" * 8,
        "not.jsonl.gz": ROW * 10,
        "bomb.jsonl.gz": bomb(b"a", 4096, b'{"x": "'),
        "trailer.jsonl.gz": packed + random.Random(0).randbytes(1000),
    }


def arrays() -> dict[str, bytes]:
    """JSON arrays."""
    return {
        "open.json": b'[{"x": 1}',
        "deep.json": b"[" * DEEP + b"]" * DEEP,
        "deep-open.json": b"[" * (20 * MIB),
        "endless-digits.json": b"[" + b"9" * (20 * MIB),
        "trailing.json": b'[{"x": 1}]' * 2,
        "latin1.json": b'[{"x": "\xe9"}]',
        "long.json": b'[{"x": "' + b"a" * (40 * MIB) + b'"}]',
        "objects.json": b'[{"x": [' + b"{}," * (12 * MIB) + b"{}]}]",
        "bomb.json.gz": bomb(b"a", 4096, b'[{"x": "'),
        "bomb-blanks.json.gz": bomb(b" ", 400, b"["),
        "bomb-rows.json.gz": bomb(b"[],", 3, b"["),
    }


def tables() -> dict[str, bytes]:
    """CSV and text."""
    return {
        "quote-long.csv": b'prompt,chosen\n1,"' + b"2" * (40 * MIB),
        "fields.csv": b"prompt,chosen\n" + b"ab," * (12 * MIB),
        "near-limit.csv": b"prompt,chosen\n" + b"ab," * (5 * MIB) + b"\n",
        "header.csv": b",".join(b"%d" % n for n in range(2_000_000)) + b"\n1,2\n",
        "twice.csv": b"prompt,prompt\n1,2\n",
        "latin1.csv": b"prompt,chosen\n\xe9,2\n",
        "after-quote.csv": b'prompt,chosen\n"1"2,3\n',
        "empty.csv": b"",
        "bomb.csv.gz": bomb(b"a", 4096, b"prompt,chosen\n"),
        "bomb-lines.csv.gz": bomb(b'a\n","', 4096, b'prompt,chosen\n"'),
        "cut.txt.gz": gzip.compress(b"text\n" * 10_000)[:40],
        "rows.zip": archive(),
        "rows.jsonl.bz2": b"BZh9" + b"\0" * 100,
        "rows.jsonl.xz": b"\xfd7zXZ\0" + b"\0" * 100,
        "rows.jsonl.zst": b"\x28\xb5\x2f\xfd" + b"\0" * 100,
    }


def parquet_bytes(**options: object) -> bytes:
    file = io.BytesIO()
    texts = [f"text {number}" for number in range(1000)]
    pq.write_table(pa.table({"prompt": texts, "n": range(1000)}), file, **options)
    return file.getvalue()


def overwritten(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


def parquets() -> dict[str, bytes]:
    """Parquet."""
    whole = parquet_bytes()
    plain = parquet_bytes(compression="none", use_dictionary=False)
    (length,) = struct.unpack("<i", whole[-8:-4])
    footer = len(whole) - 8 - length
    return {
        "magic.parquet": b"PAR1PAR1",
        "cut.parquet": whole[: len(whole) // 2],
        "encrypted.parquet": whole[:-4] + b"PARE",
        "long-footer.parquet": overwritten(whole, len(whole) - 8, struct.pack("<i", 2**31 - 1)),
        "negative-footer.parquet": overwritten(whole, len(whole) - 8, struct.pack("<i", -1)),
        "ones-in-footer.parquet": overwritten(whole, footer, b"\xff" * length),
        "list-in-footer.parquet": overwritten(whole, footer, b"\x19\xfc\xff\xff\xff\xff\x0f"),
        "ones-in-pages.parquet": overwritten(whole, 4, b"\xff" * 400),
        # A page of PLAIN texts: a length of four bytes, then the text.
        "text-length.parquet": plain.replace(b"\x06\0\0\0text 7", b"\xff\xff\xff\x7ftext 7", 1),
        "text-bytes.parquet": plain.replace(b"text 77", b"text \xff7"),
        "cut.parquet.gz": gzip.compress(whole)[:100],
    }


@pytest.mark.parametrize(
    ("make", "expected"), [(lines, 15), (arrays, 11), (tables, 15), (parquets, 11)]
)
def test_files_of_rows(
    check: Check, make: Callable[[], dict[str, bytes]], expected: int, tmp_path: Path
) -> None:
    files = {}
    for name, content in make().items():
        files[name] = tmp_path / name
        files[name].write_bytes(content)
    check("rows", files, expected)


def stream_of(column: pa.Array, name: str = "prompt") -> bytes:
    sink = io.BytesIO()
    batch = pa.record_batch({name: column})
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


TEXTS = ["first", "second", "third", "last"]
ENDS = struct.pack("<5i", 0, 5, 11, 16, 20)


def arrow_faults(whole: bytes) -> dict[str, bytes]:
    """An Arrow stream with a column of `TEXTS`, damaged."""
    assert whole.count(ENDS) == 1
    (metadata,) = struct.unpack("<i", whole[4:8])
    return {
        "beyond": whole.replace(ENDS, struct.pack("<5i", 0, 5, 1000, 16, 20)),
        "far": whole.replace(ENDS, struct.pack("<5i", 0, 5, 11, 16, 2**31 - 1)),
        "negative": whole.replace(ENDS, struct.pack("<5i", 0, -(2**31), 11, 16, 20)),
        "backwards": whole.replace(ENDS, struct.pack("<5i", 0, 11, 5, 16, 20)),
        "not-utf8": whole.replace(b"first", b"fir\xfft"),
        "metadata-length": overwritten(whole, 4, struct.pack("<i", 2**31 - 1)),
        "metadata-negative": overwritten(whole, 4, struct.pack("<i", -5)),
        "metadata": overwritten(whole, 8, b"\xff" * metadata),
        "cut": whole[: len(whole) // 2],
        "empty": b"",
    }


def test_saved_data_sets(check: Check, tmp_path: Path) -> None:
    import datasets

    whole = tmp_path / "whole"
    datasets.Dataset.from_dict({"prompt": TEXTS}).save_to_disk(str(whole))
    content = (whole / "data-00000-of-00001.arrow").read_bytes()
    damaged = {("data-00000-of-00001.arrow", n): c for n, c in arrow_faults(content).items()}
    state = json.loads((whole / "state.json").read_text())
    outside = state | {"_data_files": [{"filename": "../../../../../../etc/passwd"}]}
    damaged |= {
        ("state.json", "outside"): json.dumps(outside).encode(),
        ("state.json", "list"): b"[" * DEEP,
        ("dataset_info.json", "null"): b"null",
        ("dataset_info.json", "features"): b'{"features": {"prompt": {"_type": "os.system"}}}',
    }
    files = {}
    for (file, name), new in damaged.items():
        folder = files[f"{file} {name}"] = tmp_path / f"{file}-{name}"
        shutil.copytree(whole, folder)
        (folder / file).write_bytes(new)
    check("rows", files, 14)


def test_tables_of_artifacts(check: Check, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    with RecordsWriter(whole) as writer:
        for text in TEXTS:
            writer.add(text, Text(text))
            writer.add(text, Example((Message("user", "?"),), text))
    files = {}
    for file in ("examples.arrow", "texts.arrow"):
        content = (whole / file).read_bytes()
        at = content.index(ENDS)
        damage = {
            "beyond": overwritten(content, at, struct.pack("<5i", 0, 5, 2**30, 16, 20)),
            "ends": overwritten(content, at, struct.pack("<5i", 0, 5, 11, 16, 2**31 - 1)),
            "metadata": overwritten(content, 8, b"\xff" * 64),
            "cut": content[: len(content) // 2],
        }
        for name, new in damage.items():
            folder = files[f"{file} {name}"] = tmp_path / f"{file}-{name}"
            shutil.copytree(whole, folder)
            (folder / file).write_bytes(new)
    check("records", files, 8)
    tokens = stream_of(pa.array([[1] * 5, [2] * 6, [3] * 5, [4] * 4], pa.list_(pa.int32())))
    numbers = {}
    for name, new in arrow_faults(tokens).items():
        if name != "not-utf8":
            numbers[name] = tmp_path / f"{name}.arrow"
            numbers[name].write_bytes(new)
    check("table", numbers, 9)


def safetensors(fields: object, data: bytes = b"", length: int | None = None) -> bytes:
    content = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def weights(shape: list[int], begin: int, end: int, kind: str = "F32") -> bytes:
    tensor = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    return safetensors({"model.embed_tokens.weight": tensor}, b"\0" * 64)


def test_models(check: Check, tmp_path: Path, make_model: Callable[..., Path]) -> None:
    damaged = {
        ("config.json", "open"): b"{",
        ("config.json", "list"): b"[1]",
        ("config.json", "deep"): b'{"x":' * DEEP,
        ("config.json", "kind"): b'{"model_type": "../../etc"}',
        ("config.json", "sizes"): b'{"model_type": "llama", "hidden_size": -1}',
        ("tokenizer.json", "open"): b"{",
        ("tokenizer.json", "deep"): b"[" * DEEP,
        ("tokenizer.json", "null"): b"null",
        ("model.safetensors", "empty"): b"",
        ("model.safetensors", "length"): safetensors({}, length=2**63),
        ("model.safetensors", "long"): safetensors({}, length=2**30),
        ("model.safetensors", "text"): safetensors(b"no JSON"),
        ("model.safetensors", "deep"): safetensors(b'{"x":' * 10_000),
        ("model.safetensors", "beyond"): weights([288, 32], 0, 2**40),
        ("model.safetensors", "backwards"): weights([4, 4], 64, 0),
        ("model.safetensors", "shape"): weights([2**40, 2**40], 0, 64),
        ("model.safetensors", "kind"): weights([4, 4], 0, 64, "PICKLE"),
        ("model.safetensors", "zip"): archive(),
    }
    whole, files = make_model("llama"), {}
    for (file, name), content in damaged.items():
        folder = files[f"{file} {name}"] = tmp_path / f"{file}-{name}"
        shutil.copytree(whole, folder)
        (folder / file).write_bytes(content)
    check("model", files, 18)


def test_records_of_artifacts_checkpoints_and_votes(check: Check, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "weights").write_text("abc")
    Manifest("sft", "f" * 64, 1, {}, {}, {}, {}, file_entries(whole)).write(whole)
    manifest = (whole / "manifest.json").read_bytes()
    artifacts = {
        "cut": manifest[:100], "empty": b"", "list": b"[]", "null": b"null", "deep": b"[" * DEEP,
        "digits": b'{"seed": ' + b"9" * 100_000 + b"}", "latin1": b'{"stage": "\xe9"}',
        "changed": manifest.replace(b'"seed": 1', b'"seed": 2'),
    }  # fmt: skip
    files = {name: tmp_path / f"manifest-{name}" for name in artifacts}
    for name, content in artifacts.items():
        shutil.copytree(whole, files[name])
        (files[name] / "manifest.json").write_bytes(content)
    check("artifact", files, 8)

    seals = {
        "cut": b"{", "list": b"[]", "text": b'{"rank0": "x"}', "deep": b"[" * DEEP,
        "latin1": b'{"\xe9": 1}', "field": b'{"rank0": {"size": 1, "other": 2}}',
    }  # fmt: skip
    sealed = {name: tmp_path / f"checkpoints-{name}" for name in seals}
    for name, content in seals.items():
        checkpoint = checkpoint_path(sealed[name], 1)
        checkpoint.mkdir(parents=True)
        seal(checkpoint, {})
        (checkpoint / "seal.json").write_bytes(content)
    check("checkpoints", sealed, 6)

    ballots = {
        "array": b"[]\n", "deep": b"[" * DEEP + b"\n", "nul": b"\0" * 1000 + b"\n",
        "latin1": b'{"pair": "\xe9"}\n',
    }  # fmt: skip
    boxes = {name: tmp_path / f"{name}.jsonl" for name in ballots}
    for name, content in ballots.items():
        boxes[name].write_bytes(content)
    check("votes", boxes, 4)
