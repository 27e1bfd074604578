"""The heap of this process: memory that it has freed, and that the C library keeps."""

import ctypes
from contextlib import suppress


def release_freed() -> None:
    """Return freed memory to the operating system.

    glibc keeps freed blocks below 32 MiB for later ones. Loading a model, or sampling with a second
    copy of its weights, leaves hundreds of MiB there, and the tensors of training do not fit the
    gaps. The call takes milliseconds. It has no effect without glibc.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
