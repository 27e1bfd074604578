import ast
import inspect
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import decode_source, resolve_name
from pathlib import Path

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.rewards import CallableReward, ModelReward, ReferenceJudge
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
    function with a parameter `references`, as far as `_definition` finds it."""
    if not isinstance(source, CallableReward):
        return isinstance(source, ReferenceJudge)
    found = _definition(source)
    arguments = ast.walk(found.args) if found else ()
    return "references" in [one.arg for one in arguments if isinstance(one, ast.arg)]


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
    """Raise ConfigError if the source cannot be parsed, does not define the function, or defines it
    with parameters that scoring cannot call."""
    bound = _bound(reward)
    if isinstance(bound.get(reward.function), ast.AsyncFunctionDef | None):
        functions = sorted(name for name, by in bound.items() if isinstance(by, ast.FunctionDef))
        raise ConfigError(
            f"{reward.callable}: found functions {', '.join(functions) or 'none'} in "
            f"{source_file(reward)}, expected {reward.function}"
        )
    function = _definition(reward)
    if function is not None and not function.decorator_list:
        check_signature(reward.callable, _signature(function.args))


def _bound(reward: CallableReward) -> dict[str, ast.stmt]:
    """The names of the reward's module, each with the last statement of the module that binds it;
    raises ConfigError if the source cannot be parsed."""
    path, bound = source_file(reward), {}
    try:
        statements = ast.parse(decode_source(path.read_bytes())).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{reward.callable}: {path} is not Python source: {error}") from None
    for statement in statements:
        is_scope = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for node in [statement] if is_scope else ast.walk(statement):
            stored = isinstance(getattr(node, "ctx", None), ast.Store) and getattr(node, "id", None)
            if name := getattr(node, "asname", None) or getattr(node, "name", None) or stored:
                bound[name] = statement
    return bound


def _definition(reward: CallableReward) -> ast.FunctionDef | None:
    """The `def` of a function, in its module or in the one that it is imported from; the `__call__`
    of an instance, without `self`. Nothing is executed.

    None if the source does not tell, as for the result of `functools.partial`.
    """
    bound, name = _bound(reward), reward.function
    while True:
        match bound.pop(name, None):
            case ast.Assign(value=ast.Name(id=name)) | ast.AnnAssign(value=ast.Name(id=name)):
                continue
            case ast.FunctionDef() as function:
                return function
            case ast.ImportFrom(names=names, level=level) as statement:
                name = [one.name for one in names if name == (one.asname or one.name)][-1]
                module = "." * level + (statement.module or "")
                # Two modules may import the name from each other.
                with suppress(ConfigError, ImportError, RecursionError):
                    module = resolve_name(module, reward.location.rpartition(".")[0])
                    return _definition(CallableReward(callable=f"{module}:{name}"))
            case ast.Assign(value=ast.Call(func=ast.Name(id=made_by))):
                made = bound.get(made_by)
                for method in made.body if isinstance(made, ast.ClassDef) else ():
                    if isinstance(method, ast.FunctionDef) and method.name == "__call__":
                        del (method.args.posonlyargs or method.args.args)[:1]
                        return method
        return None


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
