"""Program: talk in the terminal to a policy that calls tools.

    python -P -m rlhf_pipeline.episodes.chat FOLDER JSON

The JSON has the fields of `EpisodesConfig`, `sampling` and `seed`. An empty line ends it.
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.episodes import EpisodesConfig
from rlhf_pipeline.config.evaluate import EvaluationSamplingConfig
from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.data.records import Conversation, dialogue
from rlhf_pipeline.data.template import render_prompts, render_replies
from rlhf_pipeline.data.token_contract import Reader, TokenContract
from rlhf_pipeline.data.tokenization import encode
from rlhf_pipeline.episodes.partner import Cleaner, Partner
from rlhf_pipeline.episodes.processes import Server
from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.generation.generator import Generator
from rlhf_pipeline.generation.transformers_generator import TransformersGenerator
from rlhf_pipeline.models.loading import load_policy, load_tokenizer, saved_precision


def talk(
    generator: Generator,
    reader: Reader,
    config: EpisodesConfig,
    sampling: SamplingConfig,
    seed: int,
    ask: Callable[[], str],
) -> None:
    """Answer each question of `ask` in an episode that begins with the conversation so far; print
    the turns of the policy and the replies of its tools."""
    server, clean = Server("chat", config.code(), {}, config.tool_timeout_s), Cleaner(reader)
    messages: Conversation = []
    while question := ask():
        task = {"messages": [*messages, {"role": "user", "content": question}]}
        own_seed = (seed, len(messages))
        limit = sampling.max_response_tokens
        partner = Partner(server, config, reader, clean, limit, task, own_seed)
        (text,) = render_prompts(reader.tokenizer, ["the chat"], [partner.episode.prompt])
        ids, shown = list[int](), 0
        for turn in range(config.max_turns):
            ids, partner.asked = ids + encode([text], reader.tokenizer)[0], text
            found = generator.generate([ids], sampling, [(*own_seed, turn)])
            said = found.sequences.response_ids[0].tolist()
            ids = ids + said
            ended = said[-1] in reader.contract.eos_ids
            written = reader.tokenizer.decode(said[:-1] if ended else said)
            replies = partner.reply(written) if ended else None
            if not ended:
                partner.cut(written)
            print(dialogue(partner.episode.messages[shown:]), flush=True)
            shown = len(partner.episode.messages)
            if replies is None:
                break
            text = render_replies(reader, replies, server.schemas())
        partner.close()
        messages = [*task["messages"], *partner.episode.messages]


def main(folder: Path, given: dict[str, Any]) -> None:
    """Load the policy, and read questions from the terminal until its end."""
    sampling = EvaluationSamplingConfig(**given.pop("sampling"))
    seed, contract = given.pop("seed"), TokenContract.read(folder)
    reader = Reader(load_tokenizer(folder), contract)
    policy = load_policy(folder, saved_precision(folder) or "fp32").eval()
    generator = TransformersGenerator(policy, contract)
    with suppress(EOFError, KeyboardInterrupt):
        try:
            talk(generator, reader, EpisodesConfig(**given), sampling, seed, lambda: input("You: "))
        except PipelineError as error:
            sys.exit(f"Error: {error.message}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
