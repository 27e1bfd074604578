"""The files behind PPO's rewards, looked at without importing or loading anything."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_pipeline.config.rewards import CallableReward, ModelReward, RewardSource
from rlhf_pipeline.errors import ConfigError


def reward_faults(rewards: Sequence[RewardSource]) -> list[str]:
    """What is wrong with the files that the sources name, a line each."""
    faults = []
    for index, reward in enumerate(rewards):
        try:
            match reward:
                case CallableReward():
                    _check_defined(reward)
                case ModelReward():
                    _check_model(reward)
        except ConfigError as error:
            faults.append(f"ppo.rewards.{index}: {error}")
    return faults


def source_file(reward: CallableReward) -> Path:
    """The file that holds a function's source; ConfigError where there is none. Imports nothing, no parent package either."""
    if reward.place.endswith(".py"):
        path = Path(reward.place).expanduser()
        if not path.is_file():
            raise ConfigError(f"{reward.callable}: there is no file {path.resolve()}")
        return path
    folders: Sequence[str] | None = None
    names = reward.place.split(".")
    for depth in range(1, len(names) + 1):
        name = ".".join(names[:depth])
        found = (finder.find_spec(name, folders) for finder in sys.meta_path)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or (depth < len(names) and spec.submodule_search_locations is None):
            raise ConfigError(
                f"{reward.callable}: there is no module {reward.place}; install it, put its folder on PYTHONPATH, or name "
                "its file"
            )
        folders, origin = spec.submodule_search_locations, spec.origin
    if origin is None or not origin.endswith(".py"):
        raise ConfigError(f"{reward.callable}: the module {reward.place} has no Python source file")
    return Path(origin)


def _check_defined(reward: CallableReward) -> None:
    """ConfigError where the source cannot be parsed, or binds no such name at its top level."""
    path = source_file(reward)
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{reward.callable}: {path} is no Python source: {error}") from None
    bound = set(_bound(tree))
    if reward.function not in bound:
        functions = ", ".join(
            sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
        )
        raise ConfigError(
            f"{reward.callable}: {path} does not define {reward.function}; its functions are {functions or 'none'}"
        )


def _bound(tree: ast.Module) -> list[str]:
    """Names that functions, imports and assignments bind at the top level, `if` and `try` included."""
    names: list[str] = []
    pending: list[ast.AST] = list(tree.body)
    while pending:
        match node := pending.pop():
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names += [alias.asname or alias.name.partition(".")[0] for alias in aliases]
            case ast.Name(id=name, ctx=ast.Store()):
                names.append(name)
            case ast.AsyncFunctionDef() | ast.Lambda():
                pass
            case _:
                pending += ast.iter_child_nodes(node)
    return names


def _check_model(reward: ModelReward) -> None:
    """ConfigError where the folder holds no classifier with one label, or not what its tokens take."""
    config = reward.folder / "config.json"
    if not config.is_file():
        raise ConfigError(
            f"path {reward.folder.resolve()} is no folder with a model: it has no config.json"
        )
    labels = len(
        json.loads(config.read_text()).get("id2label") or "  "
    )  # transformers leaves two labels out
    if labels != 1:
        raise ConfigError(
            f"{reward.path} is no reward model: it has {labels} labels, and a score is one"
        )
    if reward.retokenize and not (reward.folder / "tokenizer_config.json").is_file():
        raise ConfigError(
            f"{reward.path} has no tokenizer (tokenizer_config.json); save its own beside it"
        )
    if not reward.retokenize and not (reward.folder / "token_contract.json").is_file():
        raise ConfigError(
            f"{reward.path} has no token_contract.json, so its tokens may not be the policy's; set retokenize to true to "
            "give it texts in its own chat template"
        )
