from my_rlhf.simpo.config import SimPOConfig
from rlhf_pipeline.stages.job import Job, StageSpec

SPEC = StageSpec(
    name="simpo",
    program="my_rlhf.simpo.program",
    blocks={"simpo": SimPOConfig},
    batch_sizes=("simpo.batch_size",),
    headline_metrics=("simpo/loss", "validation/accuracy"),
)
READS = "split sft_model"  # the data sets before the parameters


def simpo(split, sft_model, config, seed, stages):
    inputs = {"comparisons": split / "reward_model", "sft_model": sft_model}
    return stages.run(Job(SPEC, {"simpo": config}, inputs, seed))
