"""Names and files of tasks, without importing the lm-evaluation-harness, which takes seconds."""

import re
from collections.abc import Iterator
from glob import escape, glob
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import yaml

from rlhf_pipeline.config.evaluate import TASK_PREFIX, TasksConfig
from rlhf_pipeline.errors import suggestion

_NAMES = re.compile(r"""^[ \t]*(?:-|["']?(?:task|group|tag)["']?:)[ \t]*(.+)""", re.MULTILINE)
"""Lines with names of tasks, groups or tags; items of a list may be tags."""


def task_faults(config: TasksConfig) -> Iterator[str]:
    """Names that the harness does not know, and files that cannot be read."""
    known = _known_names() if len(config.files) < len(config.names) else set()
    for index, name in enumerate(config.names):
        place = f"evaluate.tasks.names.{index}: found {name}"
        if name in config.files:
            try:
                _named_files(Path(name).expanduser())
            except (OSError, UnicodeError, yaml.YAMLError) as error:
                yield f"{place}, expected a file of YAML: {error}"
        elif name not in known:
            yield (
                f"{place}{suggestion(name, known)}, expected FILE.yaml or a name of the "
                "lm-evaluation-harness. Fix: `lm-eval ls tasks` lists them"
            )


def task_inputs(config: TasksConfig | None) -> dict[str, Path]:
    """Inputs of the evaluation: the files among the tasks, and all files that they name."""
    names = config.files if config is not None else ()
    files = [file for name in names for file in _named_files(Path(name).expanduser())]
    return {f"{TASK_PREFIX}{number}": file for number, file in enumerate(files)}


def _named_files(path: Path) -> list[Path]:
    """A task file, its data, the files that it includes, and the modules of its functions.

    A name is relative to the file or to the current folder, as in the harness, or a pattern.
    """
    found = [path]
    for file in found:
        if file.name.endswith(("yaml", "yml")):
            events = yaml.parse(file.read_text(encoding="utf-8"), yaml.SafeLoader)
            for text in [event.value for event in events if isinstance(event, yaml.ScalarEvent)]:
                module = escape(text.rpartition(".")[0].replace(".", "/") + ".py")
                for folder, name in product((file.parent, Path()), (text, module)):
                    # Path.glob refuses absolute names.
                    named = sorted(glob(name, root_dir=folder, recursive=True))  # noqa: PTH207
                    paths = [folder / each for each in named]
                    found += [each for each in paths if each.is_file() and each not in found]
    return found


def _known_names() -> set[str]:
    """The words where the harness names tasks: all its names, and some other words."""
    package = find_spec("lm_eval")
    assert package is not None and package.origin is not None, "the caller looks for it"
    files = Path(package.origin).with_name("tasks").rglob("*")
    # Included files have no suffix.
    texts = (path for path in files if path.suffix in ("", ".yaml") and path.is_file())
    lines = (line for path in texts for line in _NAMES.findall(path.read_text("utf-8")))
    return {word for line in lines for word in re.findall(r"[^\s\"',\[\]{}]+", line)}
