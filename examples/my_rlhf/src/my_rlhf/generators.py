import torch

from rlhf_pipeline.generation.generator import uniform_draws
from rlhf_pipeline.generation.records import Rollout
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.rl.logprobs import sampled


class PlainGenerator:
    """Samples one response at a time, without a key-value cache; not for ZeRO 3."""

    def __init__(self, policy, contract):
        self.policy, self.contract = policy, contract

    @torch.no_grad()
    def generate(self, prompts, sampling, seeds, prompt_numbers=None):
        device = next(self.policy.parameters()).device
        draws = uniform_draws(seeds, sampling.max_response_tokens).to(device)
        logprobs, responses = torch.zeros(draws.shape), []
        for row, prompt in enumerate(prompts):
            ids = list(prompt)
            for step, draw in enumerate(draws[row]):
                logits = self.policy(input_ids=torch.tensor([ids], device=device)).logits[:, -1]
                token, logprobs[row, step] = sampled(
                    logits, draw[None], sampling.temperature, self.contract.vocab_size
                )
                ids.append(int(token))
                if ids[-1] in self.contract.eos_ids:
                    break
            responses.append(ids[len(prompt) :])
        sequences = collate(prompts, responses, self.contract.pad_id, prompt_numbers=prompt_numbers)
        return Rollout(sequences, logprobs[:, : sequences.response_ids.shape[1]])
