from __future__ import annotations

import random
from collections.abc import Callable
from gzip import compress

from rlhf_pipeline.data.files import find_files
from rlhf_pipeline.data.files import open_stream


def test_compressed_parquet_is_seekable(
    write: Callable[[str, bytes], str],
) -> None:
    content = random.Random(0).randbytes(3_000_000)
    path = write("a.parquet.gz", compress(content, 1))
    (file,) = find_files(path).files
    with open_stream(file) as stream:
        stream.seek(2_999_990)
        assert stream.read() == content[-10:]
        stream.seek(0)
        assert stream.read(10) == content[:10]


def test_opened_files_are_closed(write: Callable[[str, bytes], str]) -> None:
    for name in ("a.txt", "a.txt.gz", "a.parquet.gz"):
        (file,) = find_files(write(name, compress(b"text"))).files
        with open_stream(file) as stream:
            assert not stream.closed
        assert stream.closed
