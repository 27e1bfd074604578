"""The registry of sources.

To add a source, write a module with `SOURCES` in this folder, and add it to `_MODULES`. After a
change to one module, only its sources are read again.
"""

from importlib import import_module

from rlhf_pipeline.data.sources.adapter import Source
from rlhf_pipeline.errors import ConfigError, suggestion

_MODULES = (
    "synthetic",
    "own_files",
    "dialogues",
    "comparisons",
    "demonstrations",
    "openassistant",
    "nvidia",
    "salesforce",
)
"""The modules of this package, in the order of docs/data.md."""

MODULES: dict[str, str] = {
    source.name: module
    for module in (f"rlhf_pipeline.data.sources.{name}" for name in _MODULES)
    for source in import_module(module).SOURCES
}
"""Name of each source -> full name of its module."""


def adapter_module(name: str) -> str:
    """Full name of the module that defines a source.

    Raises ConfigError if the source is unknown; the message suggests the nearest name.
    """
    if name in MODULES:
        return MODULES[name]
    raise ConfigError(
        f"unknown source {name!r}{suggestion(name, MODULES)}; the sources are "
        f"{', '.join(sorted(MODULES))}. For your own data, use 'files' with a column map."
    )


def find_source(name: str) -> Source:
    """The source with this name; raises like `adapter_module`."""
    sources: tuple[Source, ...] = import_module(adapter_module(name)).SOURCES
    return next(source for source in sources if source.name == name)
