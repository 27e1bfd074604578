"""A generator that ends each turn, as the random models of the tests hardly do."""

from rlhf_pipeline.generation.transformers_generator import TransformersGenerator


class Ends(TransformersGenerator):
    """Samples, and replaces the last token of each turn by EOS."""

    def __init__(self, policy, contract):
        super().__init__(policy, contract)
        self.eos_id = contract.eos_id

    def generate(self, *given):
        """As in `TransformersGenerator`; the log-probability of EOS is that of another token."""
        rollout = super().generate(*given)
        last = rollout.sequences.real_mask.sum(1, keepdim=True) - 1
        rollout.sequences.response_ids.scatter_(1, last, self.eos_id)
        return rollout
