"""Reads files as the project does, each in a child process; prints what came of each as JSON.

Each line of its input is a JSON pair, the kind of the file and its path. Results: the message of
the error that is shown to the user, or the number of unused rows; how the child ended; and its
largest resident memory in MiB. With the argument `models`, it imports what reads models.
"""

import json
import logging
import os
import resource
import signal
import sys
import tempfile
import traceback
from pathlib import Path

SECONDS = 30
"""Of the processor; the clock has ten times as many, as other programs may keep it busy."""
GUARD = 4 * 2**30
"""Bytes of a child's data, at most: it protects the machine, the test asserts the limit."""


def rows(path: Path) -> str:
    from rlhf_pipeline.data.files import read_rows
    from rlhf_pipeline.data.records import Unused

    unused = sum(isinstance(row, Unused) for _, row in read_rows(str(path), (), "train"))
    return f"{unused} rows are unused" if unused else ""


def records(folder: Path) -> str:
    from rlhf_pipeline.data.record_files import example_rows, examples, texts

    table = examples(folder)
    list(map(example_rows, table.to_batches()))
    list(texts(folder))
    return ""


def table(path: Path) -> str:
    import numpy as np

    from rlhf_pipeline.distributed.batches import Rows

    read = Rows.read(path)
    read.columns(np.arange(read.num_rows))
    return ""


def model(folder: Path) -> str:
    from rlhf_pipeline.models.loading import load_policy, load_tokenizer

    load_tokenizer(folder)
    load_policy(folder, "fp32")
    return ""


def artifact(folder: Path) -> str:
    from rlhf_pipeline.runtime.manifest import verify

    verify(folder)
    return ""


def checkpoints(folder: Path) -> str:
    from rlhf_pipeline.runtime.job import newest_valid_step

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("rlhf_pipeline").addHandler(handler)
    return messages[0] if newest_valid_step(folder) is None else ""


def votes(path: Path) -> str:
    from rlhf_pipeline.labelling.votes import read_votes

    read_votes(path)
    return ""


KINDS = (rows, records, table, model, artifact, checkpoints, votes)


def read(kind: str, path: Path) -> dict[str, object]:
    """The outcome of one file."""
    with tempfile.TemporaryFile("w+") as found:
        pid = os.fork()
        if pid == 0:
            resource.setrlimit(resource.RLIMIT_DATA, (GUARD, GUARD))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            signal.alarm(10 * SECONDS)
            found.write(_message(kind, path))
            found.flush()
            os._exit(0)
        _, status, usage = os.wait4(pid, 0)
        found.seek(0)
        code = os.waitstatus_to_exitcode(status)
        return {"message": found.read(), "code": code, "mib": usage.ru_maxrss // 1024}


def _message(kind: str, path: Path) -> str:
    from rlhf_pipeline.errors import PipelineError

    try:
        return {each.__name__: each for each in KINDS}[kind](path)
    except PipelineError as error:
        return error.message
    except BaseException:
        return traceback.format_exc()


if __name__ == "__main__":
    # Once for all children, which would spend most of their time on it.
    if sys.argv[1:] == ["models"]:
        import rlhf_pipeline.models.base_model
    else:
        import datasets  # noqa: F401

        import rlhf_pipeline.data.files  # noqa: F401
    for line in sys.stdin:
        kind, path = json.loads(line)
        print(json.dumps(read(kind, Path(path))), flush=True)
