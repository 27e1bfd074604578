from pydantic import PositiveInt

from rlhf_pipeline.config.block import Block, operational


class HybridConfig(Block):
    """A copy of the actor for generation, sharded by tensor parallelism within the same processes.

    The names are those of DeepSpeed's Hybrid Engine.
    """

    inference_tp_size: PositiveInt = 1
    """Ranks that share a copy and answer their prompts together; must divide their number."""
    max_out_tokens: PositiveInt | None = None
    """Largest number of tokens of a prompt and its response together. None: no limit."""
    tp_gather_partition_size: PositiveInt = operational(8)
    """Layers whose weights are gathered at a time."""
    pin_parameters: bool = operational(True)
    """Keep the memory of the copy between rollouts. False: free it while the actor trains."""
    release_inference_cache: bool = operational(False)
    """Give the memory of keys and values back to the device after each rollout."""
