"""Whether a training has learned: a stage that has learned nothing fails, and says why."""

import math

from rlhf_pipeline.distributed.engine_state import saved_tensors
from rlhf_pipeline.distributed.weights import WIDTH, distance, sketch
from rlhf_pipeline.distributed.zero import whole_shape
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.training.checkpoints import Checkpoints


def learned(checkpoints: Checkpoints, model: str, place: str) -> dict[str, float]:
    """How far training has moved a model, see docs/metrics.md; `place` is its parameters' block.

    Raises StageError if no step of a policy gradient taught, all gradients were 0, or no weight
    has moved.
    """
    engine, world, known = checkpoints.engines[model], checkpoints.world, checkpoints.known
    rate, factor = engine.lr_scheduler.base_lrs[0], engine.lr_scheduler.lr_lambdas[0]
    rates = [rate * factor(step) for step in range(engine.lr_scheduler.last_epoch)]
    start, taught = known["sketches"][model], known.get("taught", [True])
    moved = distance(sketch(engine, world), start)
    squares = saved_tensors(engine, None).get("exp_avg_sq", [])  # Adam's: 0 without a gradient
    if not any(taught):
        what = f"advantages of 0, or only groups of equal scores, in all {len(taught)} steps"
        fix = "check the rewards, choose prompts that are solved sometimes, or sample more answers"
    elif not world.any(any(bool(shard.any()) for shard in squares)):
        what = f"gradients of 0 in all {len(rates)} steps"
        fix = "check whether the loss counts a token, and whether the answers of a pair differ"
    elif not moved:
        what = f"no weight that {len(rates)} steps have moved, at rates up to {max(rates):g}"
        fix = f"raise {place}.optimizer.learning_rate ({rate:g}), or lower its warmup_fraction"
    else:
        numbers = sum(whole_shape(p).numel() for p in engine.parameters() if p.requires_grad)
        walk = math.sqrt(numbers * sum(rate**2 for rate in rates))
        found = {"movement": moved / walk, "change": moved / distance(start, [0] * WIDTH)}
        found |= {"taught": sum(taught) / len(taught)} if "taught" in known else {}
        return {f"learned/{name}": value for name, value in found.items()}
    raise StageError(f"{place}: found {what}, expected something to learn. Fix: {fix}")
