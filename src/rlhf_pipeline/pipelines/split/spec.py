"""The specifications of stage split and of stage source, which runs once for each source."""

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.stages.job import StageSpec

SOURCE = StageSpec(
    name="source",
    program="rlhf_pipeline.data.source",
    distributed=False,
    libraries=("datasets", "pyarrow"),
)

SPEC = StageSpec(
    name="split",
    program="rlhf_pipeline.data.split",
    distributed=False,
    libraries=("transformers", "tokenizers", "numpy", "pyarrow"),
    blocks={"split": SplitConfig},
)
