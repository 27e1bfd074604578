"""Program: write a policy as a folder that needs nothing of this project.

python -m rlhf_pipeline.models.export SOURCE TARGET OPTIONS    options of `main` as JSON
"""

import json
import os
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from rlhf_pipeline.errors import ArtifactError, PipelineError
from rlhf_pipeline.models.loading import DTYPES, load_policy, load_tokenizer
from rlhf_pipeline.runtime.imports import hidden


def main(
    source: Path, target: Path, precision: str | None, max_shard_size: str, base: str | None
) -> None:
    """Write weights, configuration, tokenizer and chat template, or an adapter for `base`.

    Without a precision, the weights are as they were saved. Raises ArtifactError if there is no
    adapter, or a weight is too large for the precision.
    """
    trust = os.environ.get("RLHF_TRUST_REMOTE_CODE") == "true"
    load_tokenizer(source, trust_remote_code=trust).save_pretrained(target)
    if base is not None:
        write_adapter(source / "adapter", target, base, precision)
        return
    model = load_policy(source, precision, trust_remote_code=trust)
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ArtifactError(
                f"{name}: found weights beyond the range of {model.dtype}. Fix: --dtype=bf16"
            )
    with hidden("deepspeed"):  # as in `base_model`
        model.save_pretrained(target, max_shard_size=max_shard_size)


def write_adapter(source: Path, target: Path, base: str, precision: str | None) -> None:
    """Write a LoRA adapter in peft's format; `base` is where its readers find its base model."""
    config, weights = source / "adapter_config.json", source / "adapter_model.safetensors"
    if not weights.is_file():
        raise ArtifactError(
            f"{source}: found no {weights.name}, expected the adapter of a policy that LoRA "
            "trained without train_rest. Fix: leave out --adapter"
        )
    fields = json.loads(config.read_text()) | {"base_model_name_or_path": base}
    (target / config.name).write_text(json.dumps(fields, indent=2))
    stored = load_file(weights)
    if precision is not None:
        stored = {name: weight.to(DTYPES[precision]) for name, weight in stored.items()}
    save_file(stored, target / weights.name, metadata={"format": "pt"})


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), **json.loads(sys.argv[3]))
    except PipelineError as error:
        sys.exit(str(error))
