"""The doors for code of others, and which of our own code comes in by them.

The configuration names `package.module:object`, one of our own, or an entry point of an installed
package. A function or a class gets what its parameters name: the values that its door offers, and
the fields of its parameter block. Sources are read: nothing is imported or executed before `load`.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import decode_source, resolve_name
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.errors import ConfigError, suggestion

PLACE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Door:
    """Where code of others comes in. `Annotated[str, door]` is a field with a name at the door."""

    name: str
    """Entry points have the group `rlhf_pipeline.<name>`."""
    own: Mapping[str, str]
    """The place of each of our own, by name."""
    offers: str = ""
    """What a function or a class of the door may ask for, besides the fields of its block."""
    method: str | None = None
    """The method that a class of the door must have."""

    def names(self) -> dict[str, str]:
        """The place of all that is installed, by name; raises ConfigError if two use one name."""
        found = dict(self.own)
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
        if name in self.own or PLACE.fullmatch(name):
            return self.own.get(name, name)
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

    def asked(self, name: str) -> set[str]:
        """What a function of the door asks for by its source, or all that the door offers."""
        try:
            function = defined(self.place(name))
        except ConfigError:
            function = None
        return parameters(function) if function else {*self.offers.split()}

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
        "transformers": "rlhf_pipeline.rollout.transformers_generator:TransformersGenerator",
        "vllm": "rlhf_pipeline.rollout.vllm_generator:VLLMGenerator",
    },
    "policy contract sampling world gather hybrid rows longest place",
    "generate",
)
_OF_PPO = {
    "auto": GENERATOR.own["transformers"],
    "hybrid": "rlhf_pipeline.rollout.hybrid_generator:HybridGenerator",
}
PPO_GENERATOR = replace(GENERATOR, own=_OF_PPO | dict(GENERATOR.own))
"""`auto` is transformers, where a run has not put vllm in its place."""


def by_name(call: Callable[..., Any], block: Block | None = None, **offered: Any) -> Any:
    """Call a function or a class with what its parameters name."""
    given = (vars(block) if block else {}) | offered
    asked = inspect.signature(call).parameters
    return call(**{name: value for name, value in given.items() if name in asked})


def at_doors(block: Block) -> Iterator[tuple[str, Door, str]]:
    """The fields of a block that name code: field, door and place."""
    for field, info in type(block).model_fields.items():
        for door in info.metadata:
            if isinstance(door, Door):
                yield field, door, door.place(getattr(block, field))


def door_faults(prefix: str, block: Block) -> Iterator[str]:
    """Code of others that is missing, or asks for what nobody offers. Nothing is imported."""
    for field, door, place in at_doors(block):
        if place in door.own.values():
            continue
        offered = [*door.offers.split(), *type(block).model_fields]
        try:
            found = signature(function := defined(place))
            if isinstance(function, ast.AsyncFunctionDef):
                raise ConfigError(f"{place}: found `async def`, expected `def`")
            if door.method:
                defined(place, door.method)
            if found is not None:
                given = {name: None for name in offered if name in found.parameters}
                found.bind(**given)
        except ConfigError as error:
            yield f"{prefix}.{field}: {error}"
        except TypeError as error:
            yield (
                f"{prefix}.{field}: {place} cannot be called: {error}. Fix: name its parameters "
                f"after what they get, which is {', '.join(door.offers.split())} and the "
                f"parameters of {prefix}; give others a default"
            )


@cache  # each call reads the metadata of all installed packages
def _entry_points(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


Function = ast.FunctionDef | ast.AsyncFunctionDef


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


def defined(place: str, method: str = "__init__") -> Function | None:
    """The function of a place, the `method` of a class, or the `__call__` of an instance, both
    without `self`; None if the source does not tell, ConfigError if it is wrong or lacks the
    name."""
    location, _, name = place.rpartition(":")
    bound = _bound(place)
    if name not in bound:
        functions = sorted(name for name, by in bound.items() if isinstance(by, Function))
        raise ConfigError(
            f"{place}: found functions {', '.join(functions) or 'none'} in "
            f"{source_file(place)}, expected {name}"
        )
    while True:
        match bound.pop(name, None):
            case ast.Assign(value=ast.Name(id=name)) | ast.AnnAssign(value=ast.Name(id=name)):
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() as function:
                return function
            case ast.ClassDef() as made:
                found = _method(made, method)
                if found is None and method != "__init__" and not made.bases:
                    raise ConfigError(f"{place}: found no method {method}, expected one")
                return found
            case ast.ImportFrom(names=names, level=level) as statement:
                name = [one.name for one in names if name == (one.asname or one.name)][-1]
                module = "." * level + (statement.module or "")
                is_package = source_file(place).name == "__init__.py"
                package = location if is_package else location.rpartition(".")[0]
                # Two modules may import the name from each other.
                with suppress(ConfigError, ImportError, RecursionError):
                    return defined(f"{resolve_name(module, package)}:{name}", method)
            case ast.Assign(value=ast.Call(func=ast.Name(id=made_by))):
                return _method(bound.get(made_by), "__call__")
        return None


def parameters(function: Function | None) -> set[str]:
    """The names of a function's parameters."""
    arguments = ast.walk(function.args) if function else ()
    return {one.arg for one in arguments if isinstance(one, ast.arg)}


def signature(function: Function | None) -> inspect.Signature | None:
    """The signature of a function; None under a decorator, which may change it."""
    if function is None or function.decorator_list:
        return None
    given = function.args
    given.defaults = [ast.Constant(None) for _ in given.defaults]
    given.kw_defaults = [default and ast.Constant(None) for default in given.kw_defaults]
    stub = ast.fix_missing_locations(ast.Expression(ast.Lambda(given, ast.Constant(None))))
    return inspect.signature(eval(compile(stub, "signature", "eval")))  # noqa: S307


def _bound(place: str) -> dict[str, ast.stmt]:
    """The last statement of the module that binds each of its names."""
    path, bound = source_file(place), {}
    try:
        statements = ast.parse(decode_source(path.read_bytes())).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{place}: {path} is not Python source: {error}") from None
    for statement in statements:
        is_scope = isinstance(statement, Function | ast.ClassDef)
        for node in [statement] if is_scope else ast.walk(statement):
            stored = isinstance(getattr(node, "ctx", None), ast.Store) and getattr(node, "id", None)
            if name := getattr(node, "asname", None) or getattr(node, "name", None) or stored:
                bound[name] = statement
    return bound


def _method(made: ast.stmt | None, name: str) -> Function | None:
    for method in made.body if isinstance(made, ast.ClassDef) else ():
        if isinstance(method, Function) and method.name == name:
            del (method.args.posonlyargs or method.args.args)[:1]
            return method
    return None
