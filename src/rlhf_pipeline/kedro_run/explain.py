"""Errors of Kedro, OmegaConf, the file system and other libraries, explained in one message."""

import errno
import os
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from omegaconf.errors import OmegaConfBaseException
from yaml.parser import ParserError

from rlhf_pipeline.errors import (
    Interrupted,
    PipelineError,
    causes,
    install,
    short_path,
    without_secrets,
)


@contextmanager
def explained_errors(*, show_traceback: bool) -> Iterator[None]:
    """Turn any error inside the block into one message for the user, which click prints.

    `show_traceback` raises the original error, with its stack.
    """
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort) as error:
        if show_traceback and isinstance(error, PipelineError):
            traceback.print_exc()
        raise
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted. Run the same command again to go on; finished stages are kept"
        ) from None
    except Exception as error:
        if show_traceback:
            raise
        raise explain(error) from error


def explain(error: Exception) -> click.ClickException:
    """The error in words: an explained error in its chain of causes, or the cause that is known.

    The stack of another error is saved in a file.
    """
    for cause in causes(error):
        if isinstance(cause, click.ClickException):
            return cause
    for cause in causes(error):
        message = _message(cause)
        if message is not None:
            return PipelineError(message)
    first_line = str(error).strip().partition("\n")[0]
    return PipelineError(
        f"unexpected {type(error).__name__}: {first_line}\nThe stack is {_save_stack(error)}. Fix: "
        "please report it with that stack"
    )


def _message(error: BaseException) -> str | None:
    match error:
        case ParserError():
            return _invalid_yaml(error)
        case OmegaConfBaseException():
            start = r"^\w+ raised while resolving interpolation: "
            first_line = re.sub(start, "", str(error).partition("\n")[0])
            return f"{error.full_key or 'conf'}: {first_line}. Fix: correct the value in conf/"
        case ValueError(args=(str(text), *_)) if text.startswith("Duplicate keys found in "):
            files, _, keys = text.removeprefix("Duplicate keys found in ").rpartition(": ")
            return f"{keys}: found in two files, {files}. Fix: remove it from one of them"
        case ValueError(args=(str(text), *_)) if text.startswith("Pipeline contains no nodes"):
            return (
                "no node of the pipeline fits all options such as --from-nodes and --to-nodes. "
                "Fix: remove or correct one of them"
            )
        case ModuleNotFoundError(name="boto3"):
            return f"MLflow's artifacts are on S3: found no package boto3. Fix: {install('s3')}"
        case OSError(errno=int(number), filename=str(path)):
            fix = _FILE_FIXES.get(number, "check the path and its file system")
            return f"{path}: {os.strerror(number)}. Fix: {fix}"
    return None


_ELSEWHERE = "set another folder with --params=root=FOLDER"
_FILE_FIXES = {
    errno.EACCES: f"give yourself the right to write there, or {_ELSEWHERE}",
    errno.EROFS: f"the file system is read-only; {_ELSEWHERE}",
    errno.ENOTDIR: f"a part of the path is a file; {_ELSEWHERE}",
    errno.EEXIST: f"the path is a file; {_ELSEWHERE}",
    errno.ENOENT: "check the spelling of the path",
}


def _invalid_yaml(error: BaseException) -> str | None:
    """Kedro's message counts lines from zero and does not show the line."""
    named = re.search(r"Invalid YAML or JSON file (.+), unable to read line", str(error))
    mark = getattr(error.__cause__, "problem_mark", None)
    if named is None or mark is None:
        return None
    file = Path(named[1])
    problem = getattr(error.__cause__, "problem", None) or "a syntax error"
    line = file.read_text(encoding="utf-8").splitlines()[mark.line : mark.line + 1]
    return "\n".join(
        [
            f"{short_path(file)}, line {mark.line + 1}, column {mark.column + 1}: {problem}",
            *(f"    {text}" for text in line),
            "Fix: correct this line or the one above it, e.g. quotes, brackets or indentation",
        ]
    )


def _save_stack(error: Exception) -> str:
    """Save the stack of an error that may not come again; return where it is."""
    stack = without_secrets("".join(traceback.format_exception(error)))
    file = Path("tracebacks") / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}.txt"
    try:
        file.parent.mkdir(exist_ok=True)
        file.write_text(stack, encoding="utf-8")
    except OSError:
        click.echo(stack, err=True)
        return "above"
    return f"in {file}"
