"""What a stage computes on one rank: its models, and the rows and passes of a step."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.sample import SampledConfig
from rlhf_pipeline.config.split import PHASES, SplitConfig
from rlhf_pipeline.config.stages import BLOCKS, POLICIES, StageConfig
from rlhf_pipeline.config.training import DeepSpeedConfig, StageModel
from rlhf_pipeline.runtime.manifest import NAME, Manifest
from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.memory import Lengths, Rows

Parameters = Mapping[str, Any]
"""Parameter blocks as plain values, by name: that of the stage, and `split`."""
Known = Mapping[str, Lengths] | None
"""The lengths of each phase; None: rows are as long as the split allows."""


@dataclass(frozen=True)
class Load:
    """What a stage computes on one rank."""

    config: StageConfig
    models: Sequence[StageModel]
    lengths: Lengths
    """Those of its phase; where the stage samples, with responses of the greatest length."""
    rows: Rows
    """The micro batches of an optimizer step."""

    @classmethod
    def of(cls, stage: str, parameters: Parameters, hardware: Hardware, lengths: Known) -> "Load":
        config = BLOCKS[stage].model_validate(parameters[stage])
        if lengths is None:
            lengths = limits(SplitConfig.model_validate(parameters["split"]))
        if isinstance(config, PPOConfig | EvaluateConfig):
            tokens = config.sampling.max_response_tokens
            own = replace(lengths["ppo"], response=tokens, longest_response=tokens)
            batch = config.minibatch_size if isinstance(config, PPOConfig) else config.prompts
        else:
            batch = config.batch_size
            if isinstance(config, SampledConfig):
                own = _sampled(config, lengths["ppo"])
            else:
                own = lengths[stage if stage in lengths else "reward_model"]  # DPO's comparisons
        # Micro batches have at most `micro_batch_tokens` tokens, or one longer row.
        whole = int(max(1, batch // hardware.world) * own.row)
        tokens = max(own.longest, min(config.micro_batch_tokens, whole))
        rows = Rows(
            passes=max(1, -(-whole // tokens)),
            computed=int(tokens * (own.prompt + own.response) / own.row),
            answers=int(tokens * own.response / own.row),
        )
        return cls(config, _models(config, parameters), own, rows)


def _models(config: StageConfig, parameters: Parameters) -> Sequence[StageModel]:
    if not isinstance(config, EvaluateConfig):
        return config.models()
    actors = [(parameters.get(name) or {}).get("actor", {}) for name in POLICIES]
    trained = [parameters["sft"] or {}, next(filter(None, actors), {})]
    settings = [DeepSpeedConfig.model_validate(one.get("deepspeed", {})) for one in trained]
    return config.models(settings)


def _sampled(config: SampledConfig, prompts: Lengths) -> Lengths:
    """The rows of a round, with answers of the greatest length."""
    copies = 1 if config.kind == "demonstrations" else 2
    tokens = copies * config.sampling.max_response_tokens
    return replace(prompts, response=tokens, longest_response=tokens, copies=copies)


def limits(split: SplitConfig) -> dict[str, Lengths]:
    """What the limits of the split allow: every row is as long as they say."""
    prompt, response = split.max_prompt_tokens, split.max_response_tokens
    one = Lengths(prompt, response, prompt, response)
    return {
        "sft": one,
        "reward_model": Lengths(prompt, 2 * response, prompt, 2 * response, copies=2),
        "ppo": Lengths(prompt, 0, prompt, 0),
        "kto": one,
    }


def measured(folder: Path, split: SplitConfig) -> dict[str, Lengths] | None:
    """The lengths of the newest split of those in `folder`; None if its parameters were others."""
    newest = max(folder.glob(f"*/{folder.name}/{NAME}"), default=None)
    if newest is None:
        return None
    made = SplitConfig.model_validate(Manifest.read(newest.parent).config["split"])
    if made.recipe() != split.recipe():
        return None
    files = json.loads((newest.parent / "report.json").read_text())["files"]
    sft, comparisons, prompts, labelled = (files[f"{x}/train.arrow"] for x in (*PHASES, "kto"))
    pairs = [(comparisons, "chosen_ids"), (comparisons, "rejected_ids")]
    found = {
        "sft": _lengths([(sft, "response_ids")]),
        "reward_model": _lengths(pairs, copies=2),
        "ppo": _lengths([(prompts, None)]),
        "kto": _lengths([*pairs, (labelled, "response_ids")]),
    }
    # A phase of weight 0 has no rows, and so no lengths.
    return limits(split) | {phase: lengths for phase, lengths in found.items() if lengths}


def _lengths(
    answers: Sequence[tuple[Mapping[str, Any], str | None]], copies: int = 1
) -> Lengths | None:
    """The lengths of the rows in files, with the column of their answers: `copies` in a row."""
    own = [(file, column) for file, column in answers if file["rows"]]
    if not own:
        return None
    rows = sum(file["rows"] for file, _ in own) // copies
    prompts = [file["tokens"]["prompt_ids"] for file, _ in own]
    responses = [file["tokens"][column] for file, column in own if column]
    longest = [response["max"] for response in responses]
    return Lengths(
        prompt=sum(prompt["total"] for prompt in prompts) / (copies * rows),
        response=sum(response["total"] for response in responses) / rows,
        longest_prompt=max(prompt["max"] for prompt in prompts),
        longest_response=sum(longest) if copies > 1 else max(longest, default=0),
        copies=copies,
    )
