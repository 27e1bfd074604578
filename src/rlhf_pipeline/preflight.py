"""Checks before a run, of all parameters together, and before a node, of what it reads."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import TrainedReward
from rlhf_pipeline.config.split import PHASES, SplitConfig
from rlhf_pipeline.config.stages import BLOCKS
from rlhf_pipeline.errors import ConfigError, StageError
from rlhf_pipeline.parameter_faults import invalid_values, length_faults, misfits, unknown_names
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.sizing.fit import find_fit, size_text
from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.models import base_model_shape


def check_root(root: str) -> None:
    """Check the name of the folder for all artifacts.

    Raises ConfigError if Kedro or PYTHONPATH would read the name as a pattern or a list, or nothing
    can be written there.
    """
    found = [character for character in root if character in "*?[]{}:"]
    if found:
        raise ConfigError(
            f"root: found {found[0]!r} in {root!r}, which Kedro or PYTHONPATH reads as part of a "
            "pattern or a list. Fix: use a local folder without any of * ? [ ] { } :"
        )
    folder = next(
        path for path in (Path(root).absolute(), *Path(root).absolute().parents) if path.exists()
    )
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        kind = "a folder that you cannot write to" if folder.is_dir() else "a file"
        raise ConfigError(
            f"root: found {root!r}, but {folder} is {kind}. Fix: set another folder with "
            "--params=root=FOLDER, or root in conf/local/globals.yml"
        )


def preflight(
    parameters: Mapping[str, Any],
    *,
    gpus: int,
    origin: Callable[[str], str | None] = lambda name: None,
    elsewhere: bool = False,
) -> None:
    """Check all parameters of a run together.

    Raises ConfigError with one line for each fault.

    Args:
        parameters: the blocks as plain values, by name.
        gpus: number of GPUs of the machine.
        origin: the file that sets a parameter; None: no file.
        elsewhere: the run is for another machine, whose libraries for GPUs are not known.
    """
    check_values(parameters, origin)
    _refuse(misfits(parameters, gpus, elsewhere=elsewhere), origin)


def check_values(
    parameters: Mapping[str, Any], origin: Callable[[str], str | None] = lambda name: None
) -> None:
    """Check each parameter by itself, as `preflight` does on every machine."""
    _refuse([*unknown_names(parameters), *invalid_values(parameters)], origin)


def check_lengths(
    positions: int | None, split: SplitConfig, ppo: PPOConfig, evaluate: EvaluateConfig
) -> None:
    """Check the limits of prompts, responses and texts against the positions of a model.

    `preflight` does this for models that are built or in a local folder. Those of a model on the
    hub are known once stage base_model has fetched it. Raises ConfigError with one line for each
    fault.
    """
    _refuse(length_faults(positions, split, ppo, evaluate))


def check_gate(reward_model: Path, gate: float | None, ppo: PPOConfig) -> None:
    """Check before PPO that its reward model is better than the gate on held-out comparisons.

    Raises StageError with the accuracy of the reward model.
    """
    used = any(isinstance(reward, TrainedReward) and reward.weight for reward in ppo.rewards)
    if gate is None or not used:
        return
    metrics = Manifest.read(reward_model).metrics
    names = [f"validation/accuracy{end}" for end in ("", "_lower", "_upper")]
    if not metrics.keys() >= {*names}:
        raise StageError(
            f"reward_model.gate: found no interval of the accuracy in {reward_model}, which an "
            "earlier version made. Fix: `kedro run --pipeline=full`, or set it to null"
        )
    accuracy, lower, upper = (metrics[name] for name in names)
    if not lower > gate:
        raise StageError(
            f"reward_model.gate: found an accuracy of {accuracy:.1%} (95%: {lower:.1%} to "
            f"{upper:.1%}) on held-out comparisons, expected a lower end above {gate:.1%}. PPO "
            "would maximize noise. Fix: use more comparisons or train longer, or set "
            "reward_model.gate to null"
        )


def check_memory(
    parameters: Mapping[str, Any], nodes: Collection[str], hardware: Hardware, *, refuses: bool
) -> list[str]:
    """Check that the stages among the nodes fit; return warnings about those that may not.

    A model whose sizes are not known is not checked, nor is a machine whose memory is not known.
    Raises ConfigError if `refuses`, and what a stage certainly holds exceeds the memory.

    Args:
        parameters: the blocks as plain values, by name.
        nodes: names of the nodes of the run.
        hardware: the ranks.
        refuses: False: only warn.
    """
    shape = base_model_shape(BaseModelConfig.model_validate(parameters["base_model"]))
    limit = hardware.rank_memory
    if shape is None or limit is None:
        return []
    kind = "GPU" if hardware.on_gpu else "share of main memory"
    faults, warnings = [], []
    for stage in [name for name in BLOCKS if any(node.startswith(name) for node in nodes)]:
        fit = find_fit(stage, parameters, shape, hardware)
        memory = fit.memory
        if memory.certain > limit:
            faults.append(
                f"{stage}: found {size_text(memory.certain)} of weights, gradients and optimizer "
                f"states on each rank, expected at most the {size_text(limit)} of its {kind}. Fix: "
                f"{fit.fix}; launch.memory_check=warn starts nevertheless"
            )
        elif not fit.fits:
            warnings.append(
                f"{stage}: the plan needs more memory than is safe: {fit.before}. Fix: {fit.fix} "
                "(kedro rlhf plan shows all of it)"
            )
    if refuses:
        _refuse(faults)
    return faults + warnings


def _refuse(faults: Iterable[str], origin: Callable[[str], str | None] = lambda name: None) -> None:
    """Raise ConfigError for faults `parameter: ...`, with the files that set the parameters."""
    lines = []
    for fault in faults:
        place, colon, rest = fault.partition(":")
        file = origin(place)
        lines.append(fault if file is None else f"{place} ({file}){colon}{rest}")
    if len(lines) == 1:
        raise ConfigError(lines[0])
    if lines:
        raise ConfigError("\n".join(["invalid parameters:", *(f"  - {one}" for one in lines)]))


def check_phases(weights: Sequence[float], nodes: Collection[str]) -> None:
    """Check that the split has prompts for every phase that the chosen nodes train.

    Raises ConfigError if a phase has weight 0 although the run splits the data for it.

    Args:
        weights: `split.weights`, in the order of `PHASES`.
        nodes: names of the nodes of the run.
    """
    empty = [
        phase
        for phase, weight in zip(PHASES, weights, strict=True)
        if weight == 0 and {"split", phase} <= set(nodes)
    ]
    if empty:
        raise ConfigError(
            f"split.weights: found {list(weights)}, with 0 for {', '.join(empty)}, expected more "
            "than 0 for each stage of the pipeline that trains. Fix: raise it, or choose a "
            "pipeline without this stage"
        )
