import inspect
import json
from collections.abc import Collection, Mapping, Sequence

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.doors import defined, parameters, signature
from rlhf_pipeline.config.rewards import (
    CallableReward,
    CodeReward,
    ModelReward,
    ReferenceReward,
    RubricReward,
)
from rlhf_pipeline.errors import ConfigError

Carried = Mapping[str, Collection[str]]
"""Sources by their place in the parameters, with the further columns that they carry."""
NONE: Carried = {}


def reward_faults(
    rewards: Sequence[Block], place: str = "ppo.rewards", sources: Carried = NONE
) -> list[str]:
    """The faults in the files of the reward sources, one line each."""
    faults = []
    for index, reward in enumerate(rewards):
        try:
            match reward:
                case CallableReward():
                    function = defined(reward.callable)
                    check_isolated(reward, parameters(function))
                    if found := signature(function):
                        check_signature(reward.callable, found, sources)
                case ModelReward():
                    _check_model(reward)
        except ConfigError as error:
            faults.append(f"{place}.{index}: {error}")
    return faults


def reads_references(source: Block) -> bool:
    """Whether a reward or a judge reads the true answers: of kind `reference` or `code`, a rubric
    with {reference}, or a function with a parameter `references`."""
    if isinstance(source, RubricReward):
        return "{reference}" in source.rubric
    if not isinstance(source, CallableReward):
        return isinstance(source, ReferenceReward | CodeReward)
    return "references" in parameters(defined(source.callable))


def check_signature(reward: str, signature: inspect.Signature, sources: Carried = NONE) -> None:
    """Raise ConfigError if a reward function cannot be called as scoring calls it, or asks for a
    column that a source does not carry. A column with a default is for all prompts or for none."""
    offered = {"references", "scored"}
    for name, parameter in list(signature.parameters.items())[2:]:
        without = [source for source, carried in sources.items() if name not in carried]
        some = 0 < len(without) < len(sources)
        is_asked = parameter.default is parameter.empty and name not in offered
        is_asked &= parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if without and (some or is_asked):
            raise ConfigError(
                f"{reward} asks for {name}, which {without[0]} does not carry. Fix: add "
                f"`extra: [{name}]` to the columns of {without[0]}"
                + ("" if some else f", or give {name} a default")
            )
        if sources and not without:
            offered.add(name)
    try:
        signature.bind([], [], **dict.fromkeys(offered & signature.parameters.keys()))
    except TypeError as error:
        raise ConfigError(
            f"{reward} cannot be called with (prompts, responses): {error}. "
            "Fix: define it as `def reward(prompts, responses)`; a further parameter "
            "`references` gets the reference answers, `scored` the tokens"
        ) from None


def check_isolated(reward: CallableReward, asked: Collection[str]) -> None:
    """Raise ConfigError if processes shall call a function that asks for the rank's tokens."""
    if reward.processes and "scored" in asked:
        raise ConfigError(
            f"{reward.callable}: found processes: {reward.processes} and the parameter scored, "
            "which no process gets. Fix: set processes to 0"
        )


def _check_model(reward: ModelReward) -> None:
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
