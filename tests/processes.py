"""Look at the programs that another program started."""

from contextlib import suppress

import psutil


def descendants(pid: int) -> list[psutil.Process]:
    """Return a process's descendants, each with ``cmdline`` and ``environ`` in ``info``.

    A program that ends meanwhile is left out. One that has ended and awaits its parent (a zombie)
    has neither a command line nor an environment: both are empty.
    """
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.info = process.as_dict(["cmdline", "environ"], ad_value=())
            found.append(process)
    return found
