"""Program: try out code and models of others before a run starts; it reads no weights.

    python -P -m rlhf_pipeline.scoring.dry_run

reads the name of a trial and its arguments as JSON, and writes each fault as a line of JSON, with
whether it is certain. The last line is null.
"""

import inspect
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.rewards import check_signature
from rlhf_pipeline.config.training import LoRAConfig
from rlhf_pipeline.errors import ConfigError, PipelineError
from rlhf_pipeline.runtime.user_code import loaded
from rlhf_pipeline.scoring.function_workers import Call, ResultError, scores

LIMIT_S = 60.0
"""Longest beginning of an episode, in seconds."""


def _loaded(place: str) -> Any:
    location, _, name = place.rpartition(":")
    return loaded(place, location, name)


def try_function(
    place: str,
    function: str,
    call: Sequence[Any] | None,
    processes: int,
    sources: Mapping[str, Sequence[str]],
    together: int = 1,
) -> Iterator[tuple[str, bool]]:
    """Call a function (`FILE.py:NAME`) that scores responses once, with `together` responses to a
    prompt as in training. `sources` are the columns that sources carry, by their places.

    Without a call it is only imported. So is one that asks for the policy's tokens or episodes, or
    for true answers that the call lacks.
    """
    is_called = False
    try:
        scored = _loaded(function)
        signature = inspect.signature(scored)
        asked = [*signature.parameters][2:]
        check_signature(function, signature, sources or {"the split": asked})
        if processes and "scored" in asked:
            raise ConfigError(
                f"{function}: found processes: {processes} and the parameter scored, which no "
                "process gets. Fix: set processes to 0"
            )
        lacks = {"scored", "episode"}
        lacks |= set() if call and call[2]["references"] else {"references"}
        if call is not None and not lacks & {*asked}:
            prompts, responses, more = call
            if not processes:  # their calls have one response
                responses = [each for each in responses for _ in range(together)]
                prompts, more = prompts * together, {name: more[name] * together for name in more}
            whole = Call(prompts, responses, {name: more[name] for name in asked if name in more})
            is_called = True
            for each in map(whole.row, range(len(responses))) if processes else [whole]:
                scores(function, scored, each)
    except PipelineError as error:
        yield f"{place}: {error.message}", not is_called or _is_certain(error.__cause__)


def _is_certain(error: BaseException | None) -> bool:
    """Whether a function fails so with every call: its results are no numbers, or a name, an import
    or an argument in it is wrong, which is not in the text of a response."""
    match error:
        case SyntaxError():
            return Path(error.filename or "").is_file()
        case NameError() | ImportError() | AttributeError(obj=ModuleType()):
            file = traceback.extract_tb(error.__traceback__)[-1].filename
            return not isinstance(error, UnboundLocalError) and Path(file).is_file()
        case TypeError():
            return re.search(r"\(\) (missing|takes|got) ", str(error)) is not None
    return isinstance(error, ResultError)


def try_episodes(
    place: str, code: Mapping[str, str], arguments: Mapping[str, Any], task: Any
) -> Iterator[tuple[str, bool]]:
    """Import tools and environment by their parameters, describe the tools to a model, and begin
    an episode of the environment with the first task; None: there is no task."""
    from rlhf_pipeline.episodes.processes import CallError, Server

    try:
        server = Server(place, code, arguments, LIMIT_S)
        server.schemas()
        if "environment" in code and task is not None:
            server.episode((0,)).ask("reset", task)
    except PipelineError as error:
        yield error.message, True
    except CallError as error:
        yield f"{place}.environment: reset failed: {error}. Fix: correct it", False


def try_doors(doors: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, bool]]:
    """Import and bind code of others, by the parameter that names it: its place, what its door
    offers, the method that a class needs, and the other parameters of the block."""
    for parameter, (place, offers, method, others) in doors.items():
        try:
            signature = inspect.signature(found := _loaded(place))
            if inspect.iscoroutinefunction(found):
                raise ConfigError(f"{place}: found `async def`, expected `def`")
            if isinstance(found, type) and method and not hasattr(found, method):
                raise ConfigError(f"{place}: found no method {method}, expected one")
            signature.bind(**dict.fromkeys({*offers, *others} & signature.parameters.keys()))
        except PipelineError as error:
            yield f"{parameter}: {error.message}", True
        except (TypeError, ValueError) as error:
            message = (
                f"{parameter}: {place} cannot be called: {error}. Fix: name its parameters after "
                f"what they get, which is {', '.join(offers)} and the parameters of "
                f"{parameter.rpartition('.')[0]}; give others a default"
            )
            yield message, True


def try_models(
    models: Mapping[str, Any], lora: Mapping[str, list[str]]
) -> Iterator[tuple[str, bool]]:
    """Look at the tokenizers of models, by block, and at names of layers, by place.

    The first model has the layers; the others need its tokens.
    """
    from rlhf_pipeline.data.token_contract import same_contract
    from rlhf_pipeline.models.base_model import found_tokenizer, without_weights
    from rlhf_pipeline.models.lora import targets

    configs = {f"{name}.path": BaseModelConfig(**block) for name, block in models.items()}
    paths = {name: config.path for name, config in configs.items() if config.path is not None}
    contracts = {}
    place = ""
    try:
        for place in paths:
            _, contracts[place] = found_tokenizer(configs[place])
        if len(contracts) > 1:
            same_contract(contracts, paths, "choose a model with the tokenizer of base_model")
        model = without_weights(next(iter(configs.values()))) if lora else None
    except PipelineError as error:
        yield f"{place}: {error.message}", True
        return
    except Exception as error:  # the model's own code may need what this process lacks
        yield f"{place or 'base_model'}: {type(error).__name__}: {error}", False
        return
    for place, names in lora.items():
        try:
            targets(model, LoRAConfig(target_modules=names), place)
        except PipelineError as error:
            yield error.message, True


def try_tasks(names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Ask the lm-evaluation-harness about names of tasks."""
    command = [sys.executable, "-P", "-m", "lm_eval", "validate", "--tasks", ",".join(names)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        said = (found.stdout or found.stderr).strip().rpartition("\n")[2]
        yield f"evaluate.tasks.names: {said}. Fix: `lm-eval ls tasks` lists the names", True


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what functions print is no answer
    trial, arguments = json.load(sys.stdin)
    for answer in (*globals()[trial](**arguments), None):
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # threads of the user may never end
