"""The doors for code of others, and which of our own code comes in by them.

The configuration names `package.module:object`, one of our own, or an entry point of an installed
package. A function or a class gets what its parameters name: the values that its door offers, and
the fields of its parameter block. The driver reads the sources of losses, advantages, generators
and rewards; it imports none, for `dry_run` does so in a process of its own.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import decode_source, resolve_name
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.errors import ConfigError, suggestion

CODE = re.compile(r"(?:.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
"""`FILE.py:NAME`, or a `PLACE`."""
PLACE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Door:
    """Where code of others comes in. `Annotated[str, door]` is a field with a name at the door."""

    name: str
    """Entry points have the group `rlhf_pipeline.<name>`."""
    builtin: Mapping[str, str]
    """The place of each of our own, by name."""
    arguments: str = ""
    """What a function or a class of the door may ask for, besides the fields of its block."""
    method: str | None = None
    """The method that a class of the door must have."""

    def names(self) -> dict[str, str]:
        """The place of all that is installed, by name; raises ConfigError if two use one name."""
        found = dict(self.builtin)
        for point in _entry_points(f"rlhf_pipeline.{self.name}"):
            if found.setdefault(point.name, point.value) != point.value:
                raise ConfigError(
                    f"entry points of rlhf_pipeline.{self.name}: found {point.name} at "
                    f"{found[point.name]} and {point.value}, expected one. Fix: rename one, or "
                    "uninstall its package"
                )
        return found

    def place(self, name: str) -> str:
        """The place of a name; raises ConfigError if there is none."""
        if name in self.builtin or PLACE.fullmatch(name):
            return self.builtin.get(name, name)
        known = self.names()
        if name not in known:
            raise ConfigError(
                f"found {self.name} {name!r}{suggestion(name, known)}, expected "
                f"{', '.join([*known, 'PACKAGE.MODULE:NAME'])}"
            )
        return known[name]

    def load(self, name: str) -> Any:
        """Import what a name stands for; raises ConfigError if that fails."""
        module, _, attribute = (place := self.place(name)).partition(":")
        try:
            found = import_module(module)
            return getattr(found, attribute) if attribute else found
        except Exception as error:  # the code of others may raise anything
            raise ConfigError(
                f"{place} cannot be imported: {type(error).__name__}: {error}. Fix: correct it, or "
                "uninstall its package"
            ) from error

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, name: str) -> str:
        try:
            self.place(name)
        except ConfigError as error:
            raise ValueError(error.message) from None
        return name


ADVANTAGE = Door(
    "advantage",
    {
        "gae": "rlhf_pipeline.rl.advantages:gae",
        "rloo": "rlhf_pipeline.rl.advantages:leave_one_out",
        "grpo": "rlhf_pipeline.rl.advantages:grpo",
        "gdpo": "rlhf_pipeline.rl.advantages:gdpo",
        "reinforce": "rlhf_pipeline.rl.advantages:reinforce",
        "reinforce++": "rlhf_pipeline.rl.advantages:reinforce_plus_plus",
        "reinforce++-baseline": "rlhf_pipeline.rl.advantages:reinforce_plus_plus_baseline",
    },
    "scores parts weights shaping penalties returns moments rewards whitened values mask",
)
POLICY_LOSS = Door(
    "policy_loss",
    {"clip": "rlhf_pipeline.rl.losses:policy_loss", "cispo": "rlhf_pipeline.rl.losses:cispo_loss"},
    "logprobs old_logprobs advantages mask reduce",
)
REWARD_LOSS = Door(
    "reward_model_loss",
    {"bradley_terry": "rlhf_pipeline.rl.losses:pairwise_loss"},
    "chosen_scores rejected_scores",
)
OF_REFERENCE = "ref_chosen_logprobs ref_rejected_logprobs chosen_log_ratios rejected_log_ratios"
"""What only a reference can tell a loss of DPO."""
DPO_LOSS = Door(
    "dpo_loss",
    {
        "sigmoid": "rlhf_pipeline.rl.preference_losses:dpo_loss",
        "ipo": "rlhf_pipeline.rl.preference_losses:ipo_loss",
        "hinge": "rlhf_pipeline.rl.preference_losses:hinge_loss",
        "robust": "rlhf_pipeline.rl.preference_losses:robust_dpo_loss",
        "sigmoid_norm": "rlhf_pipeline.rl.preference_losses:normalized_dpo_loss",
        "simpo": "rlhf_pipeline.rl.preference_losses:simpo_loss",
    },
    f"chosen_logprobs rejected_logprobs {OF_REFERENCE} chosen_lengths rejected_lengths",
)
GENERATOR = Door(
    "generator",
    {
        "transformers": "rlhf_pipeline.generation.transformers_generator:TransformersGenerator",
        "vllm": "rlhf_pipeline.generation.vllm_generator:VLLMGenerator",
    },
    "policy contract sampling world gather hybrid rows longest place",
    "generate",
)
_OF_PPO = {
    "auto": GENERATOR.builtin["transformers"],
    "hybrid": "rlhf_pipeline.generation.hybrid_generator:HybridGenerator",
}
ENVIRONMENT = Door(
    "environment",
    {
        "verifiers": "rlhf_pipeline.episodes.verifiers:Verifiers",
        "openenv": "rlhf_pipeline.episodes.openenv:OpenEnv",
    },
    "seed",
    "step",
)
PPO_GENERATOR = replace(GENERATOR, builtin=_OF_PPO | dict(GENERATOR.builtin))
"""`auto` is transformers, where a run has not put vllm in its place."""


def call_with(call: Callable[..., Any], block: Block | None = None, **offered: Any) -> Any:
    """Call with those of the offered arguments, and of the block's fields, that the signature of a
    function or a class names."""
    given = (vars(block) if block else {}) | offered
    named = inspect.signature(call).parameters
    return call(**{name: value for name, value in given.items() if name in named})


def at_doors(block: Block | None) -> Iterator[tuple[str, Door, str]]:
    """The fields of a block that name code: field, door and place."""
    for field, info in type(block).model_fields.items() if block else ():
        for door in info.metadata:
            if isinstance(door, Door):
                yield field, door, door.place(getattr(block, field))


@cache  # each call reads the metadata of all installed packages
def _entry_points(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


def source_file(place: str) -> Path:
    """The source file of a place, found without importing it; ConfigError if there is none."""
    location = place.rpartition(":")[0]
    if location.endswith(".py"):
        path = Path(location).expanduser()
        if not path.is_file():
            raise ConfigError(f"{place}: found no file {path.resolve()}. Fix: check the spelling")
        return path
    folders: Sequence[str] | None = None
    names = location.split(".")
    for depth in range(1, len(names) + 1):
        name = ".".join(names[:depth])
        found = (finder.find_spec(name, folders) for finder in sys.meta_path)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or (depth < len(names) and spec.submodule_search_locations is None):
            raise ConfigError(
                f"{place}: found no module {location}. Fix: install it, add its folder to "
                "PYTHONPATH, or, for a reward or a judge, write FILE.py:FUNCTION"
            )
        folders, origin = spec.submodule_search_locations, spec.origin
    if origin is None or not origin.endswith(".py"):
        raise ConfigError(
            f"{place}: found no Python source of module {location}, expected a "
            ".py file. Fix: wrap the function in a Python file"
        )
    return Path(origin)


def parameters(place: str) -> set[str]:
    """The names of a function's parameters by its source, through aliases and imports; none if the
    source does not tell."""
    with suppress(ConfigError, ImportError, RecursionError, SyntaxError, ValueError):
        arguments = _arguments(place)
        return {one.arg for one in ast.walk(arguments) if isinstance(one, ast.arg)}
    return set()


@lru_cache(maxsize=32)  # a plan reads the same sources many times
def _statements(source: bytes) -> list[ast.stmt]:
    return ast.parse(decode_source(source)).body


def _arguments(place: str) -> ast.AST:
    """Those of a function, or of the `__call__` of an instance; an empty node if there is none."""
    location, _, name = place.rpartition(":")
    path = source_file(place)
    bound: dict[str, ast.stmt] = {}  # by name, the last statement of the module that binds it
    for statement in _statements(path.read_bytes()):
        for node in [statement] if hasattr(statement, "name") else ast.walk(statement):
            stored = isinstance(getattr(node, "ctx", None), ast.Store) and getattr(node, "id", None)
            if named := getattr(node, "asname", None) or getattr(node, "name", None) or stored:
                bound[named] = statement
    while True:
        match bound.pop(name, None):
            case ast.Assign(value=ast.Name(id=name)) | ast.AnnAssign(value=ast.Name(id=name)):
                continue
            case ast.FunctionDef(args=found) | ast.AsyncFunctionDef(args=found):
                return found
            case ast.Assign(value=ast.Call(func=ast.Name(id=made_by))):
                for method in getattr(bound.get(made_by), "body", ()):
                    if isinstance(method, ast.FunctionDef) and method.name == "__call__":
                        return method.args
            case ast.ImportFrom(names=names, level=level, module=module):
                name = next(one.name for one in names if name == (one.asname or one.name))
                package = location if path.name == "__init__.py" else location.rpartition(".")[0]
                return _arguments(f"{resolve_name('.' * level + (module or ''), package)}:{name}")
        return ast.Module([], [])
