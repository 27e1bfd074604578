"""Files that nobody made by mistake: a message or unused rows, in bounded memory and time."""

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
def check():
    """Checks that every file of a kind ends in a message, within the limits."""
    with ExitStack() as running:

        @cache  # one process for rows, and one for models
        def reader(models: bool) -> subprocess.Popen[str]:
            command = [sys.executable, str(READER), *["models"] * models]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            return running.enter_context(subprocess.Popen(command, text=True, **pipes))

        def check(kind: str, files: dict[str, Path], expected: int) -> None:
            assert len(files) == expected
            process, faults = reader(kind in ("model", "table")), {}
            for name, path in files.items():
                print(json.dumps((kind, str(path))), file=process.stdin, flush=True)
                found = json.loads(process.stdout.readline())
                is_told = found["message"] and "Traceback" not in found["message"]
                if found["code"] != 0 or not is_told or found["mib"] > LIMIT_MIB:
                    faults[name] = found
            assert faults == {}

        yield check


def written(contents: dict[str, bytes], folder: Path) -> dict[str, Path]:
    """Files with these contents, by name."""
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return {name: folder / name for name in contents}


def copies(whole: Path, damaged: dict[tuple[str, str], bytes], to: Path) -> dict[str, Path]:
    """Copies of a folder, each with other bytes in a file, by this file and what is wrong."""
    found = {f"{file} {name}": to / f"{Path(file).name}-{name}" for file, name in damaged}
    for ((file, _), content), folder in zip(damaged.items(), found.values(), strict=True):
        shutil.copytree(whole, folder)
        (folder / file).write_bytes(content)
    return found


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
        "empty.csv": b"",
        "bomb.csv.gz": bomb(b"a", 4096, b"prompt,chosen\n"),
        "bomb-lines.csv.gz": bomb(b'a\n","', 4096, b'prompt,chosen\n"'),
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
    ("make", "expected"), [(lines, 11), (arrays, 9), (tables, 11), (parquets, 11)]
)
def test_files_of_rows(check, make, expected, tmp_path):
    check("rows", written(make(), tmp_path), expected)


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


def test_saved_data_sets(check, tmp_path):
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
    check("rows", copies(whole, damaged, tmp_path), 14)


def test_tables_of_artifacts(check, tmp_path):
    whole = tmp_path / "whole"
    with RecordsWriter(whole) as writer:
        for text in TEXTS:
            writer.add(text, Text(text))
            writer.add(text, Example((Message("user", "?"),), text))
    damaged = {}
    for file in ("examples.arrow", "texts.arrow"):
        content = (whole / file).read_bytes()
        at = content.index(ENDS)
        damaged |= {
            (file, "beyond"): overwritten(content, at, struct.pack("<5i", 0, 5, 2**30, 16, 20)),
            (file, "ends"): overwritten(content, at, struct.pack("<5i", 0, 5, 11, 16, 2**31 - 1)),
            (file, "metadata"): overwritten(content, 8, b"\xff" * 64),
            (file, "cut"): content[: len(content) // 2],
        }
    check("records", copies(whole, damaged, tmp_path), 8)
    tokens = pa.array([[1] * 5, [2] * 6, [3] * 5, [4] * 4], pa.list_(pa.int32()))
    batch, sink = pa.record_batch({"prompt": tokens}), io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    numbers = arrow_faults(sink.getvalue())
    del numbers["not-utf8"]
    check("table", written(numbers, tmp_path), 9)


def safetensors(fields: object, data: bytes = b"", length: int | None = None) -> bytes:
    content = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def weights(shape: list[int], begin: int, end: int, kind: str = "F32") -> bytes:
    tensor = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    return safetensors({"model.embed_tokens.weight": tensor}, b"\0" * 64)


def test_models(check, tmp_path, make_model):
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
    check("model", copies(make_model("llama"), damaged, tmp_path), 18)


def test_records_of_artifacts_checkpoints_and_votes(check, tmp_path):
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
    damaged = {("manifest.json", name): content for name, content in artifacts.items()}
    check("artifact", copies(whole, damaged, tmp_path), 8)

    seals = {
        "cut": b"{", "list": b"[]", "text": b'{"rank0": "x"}', "deep": b"[" * DEEP,
        "latin1": b'{"\xe9": 1}', "field": b'{"rank0": {"size": 1, "other": 2}}',
    }  # fmt: skip
    sealed, checkpoint = tmp_path / "sealed", checkpoint_path(Path(), 1)
    (sealed / checkpoint).mkdir(parents=True)
    seal(sealed / checkpoint, {})
    damaged = {(f"{checkpoint}/seal.json", name): content for name, content in seals.items()}
    check("checkpoints", copies(sealed, damaged, tmp_path), 6)

    ballots = {
        "array": b"[]\n", "deep": b"[" * DEEP + b"\n", "nul": b"\0" * 1000 + b"\n",
        "latin1": b'{"pair": "\xe9"}\n',
    }  # fmt: skip
    check("votes", written(ballots, tmp_path), 4)
