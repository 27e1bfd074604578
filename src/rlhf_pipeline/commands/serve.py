import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from rlhf_pipeline.commands.ui import require_free


def serve(folder: Path, name: str, host: str, port: int, **settings: Any) -> NoReturn:
    """Become the program `rlhf_pipeline.inference.server`, which then gets the signals itself.

    Raises ConfigError if the port is in use.
    """
    require_free(port, "serve", "end it")
    settings |= {"folder": str(folder.resolve()), "name": name, "host": host, "port": port}
    sys.stdout.flush()
    program = [sys.executable, "-P", "-m", "rlhf_pipeline.inference.server", json.dumps(settings)]
    os.execv(sys.executable, program)  # noqa: S606 - no shell
