"""The loop over turns: policies answer, tools and environments reply, until all episodes end.

    Episodes.play      all turns of a batch of episodes, as one `Rollout`

All living episodes get their next turn from the generator together, and finished ones leave. The
replies are tokens of the response that no loss, KL or advantage counts (`action_mask`). What was
sampled stays as it is, token by token: no turn is rendered again.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from rlhf_pipeline.config.episodes import CODE_PREFIX, EpisodesConfig
from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.data.record_files import further_columns
from rlhf_pipeline.data.template import render_dialogues, render_prompts, render_replies
from rlhf_pipeline.data.token_contract import Reader, any_of
from rlhf_pipeline.data.tokenization import encode
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.episodes.calls import ToolCall, calls_in
from rlhf_pipeline.episodes.partner import Cleaner, Partner
from rlhf_pipeline.episodes.processes import Server
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.generation.generator import Generator, Seed
from rlhf_pipeline.generation.records import Rollout
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import json_digest

CHECKED = 8
"""`repeat: check` plays one of so many episodes once more."""
FEWEST_CALLS = 8
"""A share of fewer calls that failed says nothing about the tools."""


def load_episodes(
    config: EpisodesConfig, reader: Reader, job: LaunchedJob, world: World, place: str
) -> "Episodes | None":
    """What plays the episodes of a policy; None if its answers have one turn."""
    return Episodes(config, reader, job, world, place) if config.has_turns else None


class Episodes:
    """Plays the episodes of a rank.

    Args:
        reader: the policy's tokenizer and contract.
        place: the parameters, for messages.
    """

    def __init__(
        self, config: EpisodesConfig, reader: Reader, job: LaunchedJob, world: World, place: str
    ) -> None:
        self._config, self._reader, self._world, self._place = config, reader, world, place
        self._clean = Cleaner(reader)
        code = config.code()
        for name, given in code.items():
            file, (location, _, own) = job.inputs[CODE_PREFIX + name], given.rpartition(":")
            job.expect_unchanged(CODE_PREFIX + name, file)
            code[name] = f"{file}:{own}" if location.endswith(".py") else given
        self._server = Server(place, code, config.environment_arguments, config.tool_timeout_s)
        self._check_template()

    def _check_template(self) -> None:
        """Raise ArtifactError if the chat template knows no tools, and StageError if it writes a
        call in a form that `calls_in` does not read: the policy would call in vain."""
        if not (tools := self._server.schemas()):
            return
        name, tokenizer = tools[0]["function"]["name"], self._reader.tokenizer
        function = {"name": name, "arguments": {"number": 1}}
        called = {"id": "call00000", "type": "function", "function": function}
        asked = [{"role": "user", "content": "?", "tools": tools}]
        turn = {"role": "assistant", "content": "", "tool_calls": [called]}
        (prompt,) = render_prompts(tokenizer, ["a prompt with tools"], [asked])
        (whole,) = render_dialogues(tokenizer, ["a call"], [[*asked, turn]])
        plain = tokenizer, ["a prompt"], [asked]  # a generation prompt may open a thought
        ends = tokenizer.convert_ids_to_tokens(list(self._reader.contract.eos_ids))
        (before,) = [prompt] if whole.startswith(prompt) else render_dialogues(*plain)
        said = any_of(ends).split(whole.removeprefix(before))[0]
        if name in said and calls_in(said, tokenizer, prompt) != [ToolCall(**function)]:
            raise StageError(
                f"{self._place}.tools: found a chat template that writes a call as {said!r}, "
                "expected a form of docs/tools.md. Fix: use a model with one of them, or set the "
                "tokenizer's response_template"
            )

    def play(
        self,
        generator: Generator,
        rows: Mapping[str, list[Any]],
        sampling: SamplingConfig,
        seeds: Sequence[Seed],
        shared: Seed,
    ) -> Rollout:
        """Play an episode for each row of the prompts' table. All ranks call this together.

        Responses to one prompt meet the same tools and environment: these are seeded by `shared`
        and the number of the prompt, and only the policy's draws by `seeds`.

        Raises StageError if a prompt is too long, too many calls failed, or with `repeat: check`
        if tools or environment reply differently the second time.
        """
        config, limit = self._config, self._config.max_turn_tokens or sampling.max_response_tokens
        own_seeds = [(*shared, number) for number in rows["prompt_number"]]
        columns = {name: rows[name] for name in ("messages", "reference")} | further_columns(rows)
        numbers = range(len(seeds))
        tasks = [{name: column[i] for name, column in columns.items()} for i in numbers]
        begin = partial(Partner, self._server, config, self._reader, self._clean, limit)
        with ThreadPoolExecutor(config.tool_processes) as pool:

            def each(work: Callable[..., Any], *given: Sequence[Any]) -> list[Any]:
                done = []
                for one in pool.map(work, *given):
                    heartbeat.report_progress()
                    done.append(one)
                return done

            partners: list[Partner] = each(begin, tasks, own_seeds)
            try:
                with getattr(generator, "same_weights", nullcontext)():
                    rollout = self._turns(generator, partners, sampling, seeds, limit, each)
                self._check_failures(partners)
                if config.repeat == "check":
                    for row in range(0, len(partners), CHECKED):
                        self._check_repeat(partners[row], begin(tasks[row], own_seeds[row]))
            finally:
                for partner in partners:
                    partner.close()
        return rollout

    def _turns(
        self,
        generator: Generator,
        partners: Sequence[Partner],
        sampling: SamplingConfig,
        seeds: Sequence[Seed],
        limit: int,
        each: Callable[..., list[Any]],
    ) -> Rollout:
        (tokenizer, contract), most = self._reader, sampling.max_response_tokens
        prompts = self._prompts(partners)
        # Equal numbers mean equal prompts, also beside the rows of another rollout.
        numbers = [int(json_digest(ids)[:15], 16) for ids in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        actions: list[list[bool]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]

        def add(row: int, ids: Sequence[int], own: Sequence[float] | None) -> None:
            tokens[row] += ids
            actions[row] += [own is not None] * len(ids)
            logprobs[row] += own or [0.0] * len(ids)

        living = [*range(len(prompts))]
        for turn in range(self._config.max_turns):
            left = max((most - len(tokens[row]) for row in living), default=0)
            count, left = self._world.most([len(living), left])
            if not count:
                break
            # ZeRO-3 needs all ranks in each forward pass: those with fewer episodes repeat one.
            asked = living + [0] * (count - len(living))
            found = generator.generate(
                [prompts[row] + tokens[row] for row in asked],
                sampling.model_copy(update={"max_response_tokens": min(limit, left)}),
                [(*seeds[row], turn) if turn else seeds[row] for row in asked],
                None if turn else [numbers[row] for row in asked],
            )
            said: dict[int, str] = {}
            for place, row in enumerate(living):
                real = found.sequences.real_mask[place]
                ids = found.sequences.response_ids[place][real].tolist()
                room = most - len(tokens[row])
                add(row, ids[:room], found.logprobs[place][real][:room].tolist())
                if len(ids) <= room and ids[-1] in contract.eos_ids:
                    said[row] = tokenizer.decode(ids[:-1])
                else:
                    partners[row].cut(tokenizer.decode(ids[:room]))
            replies = each(Partner.reply, [partners[row] for row in said], said.values())
            living = []
            for row, reply in zip(said, replies, strict=True):
                if reply is None:
                    continue
                text = render_replies(self._reader, reply, self._server.schemas())
                (ids,), partners[row].asked = encode([text], tokenizer), text
                room = most - len(tokens[row])
                add(row, ids[:room], None)
                if not room:  # without its EOS, it counts as cut
                    tokens[row].pop(), actions[row].pop(), logprobs[row].pop()
                if len(ids) < room:
                    living.append(row)
        sequences = collate(
            prompts, tokens, contract.pad_id, actions=actions, prompt_numbers=numbers
        )
        known = pad_sequence([torch.tensor(own) for own in logprobs], batch_first=True)
        return Rollout(sequences, known, tuple(partner.episode for partner in partners))

    def _prompts(self, partners: Sequence[Partner]) -> list[list[int]]:
        names = [f"{self._place}, task {number}" for number in range(len(partners))]
        dialogues = [partner.episode.prompt for partner in partners]
        texts = render_prompts(self._reader.tokenizer, names, dialogues)
        for partner, text in zip(partners, texts, strict=True):
            partner.asked = text
        prompts = encode(texts, self._reader.tokenizer)
        longest, limit = max(map(len, prompts)), self._config.max_prompt_tokens
        if longest > limit:
            raise StageError(
                f"{self._place}.max_prompt_tokens: found a prompt of {longest} tokens with the "
                f"descriptions of tools, expected at most {limit}. Fix: raise it to {longest}"
            )
        return prompts

    def _check_failures(self, partners: Sequence[Partner]) -> None:
        episodes = [partner.episode for partner in partners]
        own = {name: sum(getattr(one, name) for one in episodes) for name in ("calls", "failed")}
        total = self._world.sums({name: torch.tensor(float(n)) for name, n in own.items()})
        calls, failed, bound = total["calls"], total["failed"], self._config.max_failed_calls
        if calls >= FEWEST_CALLS and failed > bound * calls:
            fault = next((one.fault for one in episodes if one.fault), "on another rank")
            raise StageError(
                f"{self._place}.max_failed_calls: found {failed:g} of {calls:g} calls that failed, "
                f"expected at most a share of {bound:g}; such as {fault}. Fix: correct tools or "
                "environment, or raise it"
            )

    def _check_repeat(self, first: Partner, second: Partner) -> None:
        try:
            for second.asked, text in first.texts:
                second.reply(text)
        finally:
            second.close()
        one, two = first.episode, second.episode
        said = first.episode.messages[: first.replied]
        if (one.prompt, said, one.reward) != (two.prompt, two.messages, two.reward):
            pairs = zip([*one.prompt, *said], [*two.prompt, *two.messages], strict=False)
            found = next(((a, b) for a, b in pairs if a != b), (one.reward, two.reward))
            raise StageError(
                f"{self._place}.repeat: found {found[1]} where the first time was {found[0]}, "
                "expected the same reply to the same turns. Fix: let tools depend on nothing but "
                "their arguments and `random`, or set repeat to null"
            )
