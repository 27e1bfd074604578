"""A policy that says what a test wants, and episodes for it."""

import json
from pathlib import Path

import torch

from rlhf_pipeline.config.episodes import EpisodesConfig
from rlhf_pipeline.data.token_contract import Reader, TokenContract
from rlhf_pipeline.data.tokenization import encode
from rlhf_pipeline.episodes.loop import Episodes
from rlhf_pipeline.generation.records import Rollout
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.runtime.job import LaunchedJob

TOOLS = Path(__file__).parent / "episodes" / "own_tools.py"
ALL = "add", "clock", "draw", "forge", "gigabyte", "leave"


def call(name, **arguments):
    """A call as models write it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def rows(count):
    """The columns of prompts."""
    return {
        "messages": [[{"role": "user", "content": f"question {i}"}] for i in range(count)],
        "reference": [f"answer {i}" for i in range(count)],
        "prompt_number": [*range(count)],
    }


def episodes(tokenizer, world, tools=(), environment=None, **more):
    """The episodes of a policy with these tools of the tests."""
    places = [f"{TOOLS}:{name}" for name in tools]
    own = None if environment is None else f"{TOOLS}:{environment}"
    config = EpisodesConfig(tools=places, environment=own, **more)
    inputs = config.code_inputs()
    job = LaunchedJob("grpo", "", 0, {}, inputs, {}, Path(), 0.0)
    found = Episodes(config, Reader(tokenizer, TokenContract.of(tokenizer)), job, world, "grpo")
    found.reader = Reader(tokenizer, TokenContract.of(tokenizer))
    return found


class Scripted:
    """Says the turns of each row in their order, with log-probability -1 for each token."""

    def __init__(self, reader, said):
        self.reader, self.said, self.asked, self.seeds = reader, said, [], []

    def generate(self, prompts, sampling, seeds, prompt_numbers=None):
        """Say the next turns."""
        self.asked.append(prompts)
        self.seeds.append(seeds)
        texts = []
        for seed in seeds:
            row, turn = seed[2], seed[3] if len(seed) > 3 else 0
            texts.append(self.said[row][turn] + "<|end|>")
        ids = [one[: sampling.max_response_tokens] for one in encode(texts, self.reader.tokenizer)]
        sequences = collate(prompts, ids, self.reader.contract.pad_id)
        return Rollout(sequences, torch.where(sequences.real_mask, -1.0, 0.0))
