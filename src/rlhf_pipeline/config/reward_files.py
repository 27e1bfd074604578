import ast
import inspect
import json
import symtable
import sys
from collections.abc import Sequence
from importlib.util import decode_source
from pathlib import Path

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.judges import ReferenceJudge
from rlhf_pipeline.config.rewards import CallableReward, ModelReward
from rlhf_pipeline.errors import ConfigError


def reward_faults(rewards: Sequence[Block], place: str = "ppo.rewards") -> list[str]:
    """Return the faults in the files of the reward sources, one line each."""
    faults = []
    for index, reward in enumerate(rewards):
        try:
            match reward:
                case CallableReward():
                    _check_defined(reward)
                case ModelReward():
                    _check_model(reward)
        except ConfigError as error:
            faults.append(f"{place}.{index}: {error}")
    return faults


def reads_references(source: Block) -> bool:
    """Whether a reward or a judge reads the true answers: a judge of the kind `reference`, or a
    function defined in its file, which is not imported, with a parameter `references`."""
    if not isinstance(source, CallableReward):
        return isinstance(source, ReferenceJudge)
    defined = [
        node.args
        for node in ast.parse(decode_source(source_file(source).read_bytes())).body
        if isinstance(node, ast.FunctionDef) and node.name == source.function
    ]
    found = [arg.arg for args in defined[-1:] for arg in ast.walk(args) if isinstance(arg, ast.arg)]
    return "references" in found


def source_file(reward: CallableReward) -> Path:
    """Return the source file of a reward function, without importing its module or packages.

    Raises ConfigError if the file or the module does not exist.
    """
    if reward.location.endswith(".py"):
        path = Path(reward.location).expanduser()
        if not path.is_file():
            raise ConfigError(f"{reward.callable}: found no file {path.resolve()}")
        return path
    folders: Sequence[str] | None = None
    names = reward.location.split(".")
    for depth in range(1, len(names) + 1):
        name = ".".join(names[:depth])
        found = (finder.find_spec(name, folders) for finder in sys.meta_path)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or (depth < len(names) and spec.submodule_search_locations is None):
            raise ConfigError(
                f"{reward.callable}: found no module {reward.location}. "
                "Fix: install it, add its folder to PYTHONPATH, or write FILE.py:FUNCTION"
            )
        folders, origin = spec.submodule_search_locations, spec.origin
    if origin is None or not origin.endswith(".py"):
        raise ConfigError(
            f"{reward.callable}: found no Python source of module {reward.location}, expected a "
            ".py file. Fix: wrap the function in a Python file"
        )
    return Path(origin)


def check_signature(reward: str, signature: inspect.Signature) -> None:
    """Raise ConfigError if a reward function cannot be called as scoring calls it."""
    names: set[str] = {"references"} & signature.parameters.keys()
    try:
        signature.bind([], [], **dict.fromkeys(names))
    except TypeError as error:
        raise ConfigError(
            f"{reward} cannot be called with (prompts, responses): {error}. "
            "Fix: define it as `def reward(prompts, responses)`; a third parameter "
            "`references` gets the reference answers"
        ) from None


def _check_defined(reward: CallableReward) -> None:
    """Raise ConfigError if the source cannot be parsed, or does not define the function.

    The signature is checked if the name is bound by one plain `def`; else it is known at import.
    """
    path = source_file(reward)
    try:
        source = decode_source(path.read_bytes())
        tree = ast.parse(source)
        module = symtable.symtable(source, str(path), "exec")
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{reward.callable}: {path} is not Python source: {error}") from None
    bound = {
        symbol.get_name()
        for symbol in module.get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    } - {node.name for node in tree.body if isinstance(node, ast.AsyncFunctionDef)}
    if reward.function not in bound:
        functions = sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
        raise ConfigError(
            f"{reward.callable}: found functions {', '.join(functions) or 'none'} in {path}, "
            f"expected {reward.function}"
        )
    found = [
        node
        for node in ast.walk(tree)
        if reward.function in (getattr(node, "name", None), getattr(node, "asname", None))
        or (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and node.id == reward.function
        )
    ]
    if len(found) == 1 and isinstance(found[0], ast.FunctionDef) and not found[0].decorator_list:
        check_signature(reward.callable, _signature(found[0].args))


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """The signature of a function in source. Nothing of the source is executed."""
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    stub = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, ast.Constant(None))))
    return inspect.signature(eval(compile(stub, "signature", "eval")))  # noqa: S307


def _check_model(reward: ModelReward) -> None:
    """Raise ConfigError if a file is missing, or the model does not have one label."""
    config = reward.folder / "config.json"
    if not config.is_file():
        raise ConfigError(
            f"path {reward.folder.resolve()}: found no config.json, expected a folder with a model"
        )
    # transformers does not write two labels, its default.
    labels = len(json.loads(config.read_text()).get("id2label") or "  ")
    if labels != 1:
        raise ConfigError(f"{reward.path} is not a reward model: found {labels} labels, expected 1")
    if reward.retokenize and not (reward.folder / "tokenizer_config.json").is_file():
        raise ConfigError(
            f"{reward.path}: found no tokenizer_config.json, expected the model's tokenizer. "
            "Fix: save the tokenizer in the same folder"
        )
    if not reward.retokenize and not (reward.folder / "token_contract.json").is_file():
        raise ConfigError(
            f"{reward.path}: found no token_contract.json, expected the policy's tokenizer. "
            "Fix: set retokenize to true to pass texts in the model's own chat template"
        )
