"""Responses token by token. On a GPU, one recorded graph computes all of a token.

A step reads and writes tensors that stay where they are: the newest tokens, their positions, the
keys and values. So a GPU can record its kernels once for each number of rows, and replay them for
every token of every rollout; the host then launches one graph instead of hundreds of kernels.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.models.lean_transformers import PreTrainedModel
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.rl.logprobs import sampled
from rlhf_pipeline.rollout.key_values import RoomyCache, prompt_cache
from rlhf_pipeline.runtime import heartbeat

FINISHED = 0.25
"""On a CPU, finished rows leave once they are this share of a batch, because leaving copies the
keys and values of the other rows."""
LOOK_EVERY = 16
"""Tokens between two looks at which rows have finished, of all ranks or of the host at its GPU."""
ROOM = 128
"""The room for tokens is a multiple of this, so that few rollouts need new graphs."""
ROUNDINGS = 64
"""Units of its precision by which the logits of a replay may differ from those of its recording, as
a root mean square relative to that of the logits."""

Replay = Callable[[], None]


class Decoder:
    """Samples responses to a batch of prompts at a time.

    Shapes: B the most rows of a batch, n the rows that are left, R tokens of a response, S columns
    of keys and values, V tokens of the vocabulary.

    Args:
        model: the model, whose weights may change between two batches.
        prepared: whether one mask of four dimensions holds for all layers.
        synced: whether every rank must take part in every forward pass.
        graphs: whether to record the steps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        contract: TokenContract,
        *,
        rows: int,
        room: int,
        tokens: int,
        device: torch.device,
        prepared: bool,
        synced: bool,
        graphs: bool,
    ) -> None:
        self._model, self._contract = model, contract
        self._prepared, self._synced, self._graphs = prepared, synced, graphs
        self._replays: dict[int, Replay] = {}
        self._addresses = addresses(model)
        self._temperature = 1.0
        long: Any = {"dtype": torch.long, "device": device}
        self._column, self._step = torch.zeros(1, **long), torch.zeros(1, **long)
        self._cache = RoomyCache(rows, room, self._column)
        self._visible = torch.zeros(rows, room, dtype=torch.bool, device=device)  # (B, S)
        self._eos = torch.tensor(contract.eos_ids).to(device, non_blocking=True)
        self._ids = torch.zeros(rows, 1, **long)
        self._positions = torch.zeros(rows, 1, **long)
        self._places = torch.zeros(rows, **long)  # of the rows that are left, in the batch
        self._finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self._draws = torch.zeros(rows, tokens, dtype=torch.float64, device=device)
        self._tokens = torch.zeros(rows, tokens, **long)
        self._logprobs = torch.zeros(rows, tokens, device=device)
        self._logits: dict[int, Tensor] = {}  # (n, V), of the newest step

    def fits(self, model: PreTrainedModel, rows: int, room: int, tokens: int) -> bool:
        """Whether a batch of this size can use the memory of this decoder."""
        return (
            model is self._model
            and rows <= self._cache.rows
            and room <= self._cache.room
            and tokens <= self._draws.shape[1]
            and (not self._replays or addresses(model) == self._addresses)
        )

    def run(
        self, ids: Tensor, mask: Tensor, numbers: Tensor | None, draws: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities of the responses, (b, R) each.

        What follows the first EOS of a row has no meaning.

        Args:
            ids, mask: (b, P) prompts, left-padded, in main memory.
            numbers: (b,) prompts with the same number are read once; None: each is read.
            draws: (b, R) uniform numbers in [0, 1).
        """
        (count, width), steps = ids.shape, draws.shape[1]
        if temperature != self._temperature:
            self._replays.clear()  # it is a constant of a graph
            self._temperature = temperature
        rows = self._size(count) if self._graphs else count
        if rows > count:  # the rest repeats the first row, and nobody reads it
            ids, mask, draws = (
                torch.cat([x, x[:1].repeat(rows - count, 1)]) for x in (ids, mask, draws)
            )
            if numbers is not None:
                numbers = torch.cat([numbers, numbers[:1].repeat(rows - count)])
        self._begin(mask, draws, self._read(ids, mask, numbers))
        self._finished[count:rows].fill_(True)
        for step in range(1, steps):
            seen = width + step - 1
            heartbeat.tick()
            if (left := self._look(rows, step)) is not None:
                if left == 0:
                    break
                if (size := self._size(left) if self._graphs else left) < rows:
                    self._keep(rows, size, seen)
                    rows = size
            self._advance(rows, seen)
        return self._tokens[:count, :steps], self._logprobs[:count, :steps]

    def _size(self, count: int) -> int:
        """The fewest rows of a graph for so many: all rows, or a power of two."""
        return min(1 << (count - 1).bit_length(), self._cache.rows)

    def _read(self, ids: Tensor, mask: Tensor, numbers: Tensor | None) -> Tensor:
        """Read the prompts; return the logits (n, V) after them."""
        device, cache = self._column.device, self._cache
        if numbers is not None:
            numbered = torch.cat([ids.masked_fill(~mask, -1), numbers[:, None]], dim=1)
            numbered, copies = torch.unique(numbered, dim=0, return_inverse=True)
            ids, mask = numbered[:, :-1].clamp(min=0), numbered[:, :-1] >= 0
        nothing = torch.empty(len(ids), 0, dtype=torch.long)
        prompts = Sequences(ids, mask, nothing, nothing.bool(), nothing.bool()).to(device)
        cache.seen = 0
        if numbers is None:
            return self._forward(prompts.model_inputs(), cache)[:, -1]
        copies = copies.to(device, non_blocking=True)
        rows, states = prompts.packed(), prompt_cache()
        logits = self._forward(rows.model_inputs(), states, keep=rows.ends)[0]
        cache.unpack(states, prompts.prompt_mask, copies)
        return logits[copies]

    def _begin(self, mask: Tensor, draws: Tensor, logits: Tensor) -> None:
        """Fill the tensors of a batch, and sample its first token."""
        rows, width = mask.shape
        device = self._column.device
        self._visible.zero_()
        self._visible[:rows, :width].copy_(mask, non_blocking=True)
        self._positions[:rows, 0].copy_(mask.sum(1) - 1, non_blocking=True)
        self._draws[:rows, : draws.shape[1]].copy_(draws, non_blocking=True)
        self._places[:rows] = torch.arange(rows, device=device)
        self._finished.zero_()
        self._step.zero_()
        self._column.fill_(width - 1)
        self._sample(rows, logits)

    def _sample(self, rows: int, logits: Tensor) -> None:
        """Sample the token of a step for the first rows, and go on to the next step."""
        draws = self._draws.index_select(1, self._step).squeeze(1)[self._places[:rows]]
        tokens, logprobs = sampled(logits, draws, self._temperature, self._contract.vocab_size)
        place = self._places[:rows], self._step.expand(rows)
        self._tokens.index_put_(place, tokens)
        self._logprobs.index_put_(place, logprobs)
        self._ids[:rows, 0] = tokens
        self._finished[:rows] |= (tokens[:, None] == self._eos).any(1)
        self._step += 1
        self._column += 1
        self._positions[:rows] += 1

    def _look(self, rows: int, step: int) -> int | None:
        """The number of rows without an EOS; None if the host does not look, or keeps all rows.

        Looking at each token would make the host wait for its GPU, so it looks at fixed tokens.
        Rounding depends on the number of rows, so if the time decided, a rollout could not be
        repeated, and ranks that sample the same tokens would part.
        """
        if step % LOOK_EVERY and (self._synced or self._finished.device.type != "cpu"):
            return None
        if self._synced:
            unfinished = (~self._finished[:rows]).any().float()
            torch.distributed.all_reduce(unfinished)
            return rows if bool(unfinished) else 0
        left = rows - int(self._finished[:rows].sum())
        is_worth = self._graphs or rows - left >= FINISHED * rows
        return left if is_worth else None

    def _keep(self, rows: int, size: int, end: int) -> None:
        """Move `size` of the rows to the front: those that go on, then finished ones."""
        order = self._finished[:rows].byte().argsort(stable=True)[:size]
        self._cache.keep_rows(order, end)
        for tensor in (self._visible, self._ids, self._positions, self._places, self._finished):
            tensor[:size] = tensor[order]

    def _advance(self, rows: int, seen: int) -> None:
        """Process the newest token of the first rows and sample the next one."""
        if not self._graphs:
            self._compute(rows, seen, seen + 1)
        elif rows in self._replays:
            self._replays[rows]()
        else:
            self._replays[rows] = self._recorded(rows, seen)

    def _compute(self, rows: int, seen: int, end: int) -> None:
        """One step, whose tokens attend to the first `end` columns."""
        self._cache.seen, self._cache.end = seen, end
        self._visible[:rows].index_fill_(1, self._column, True)
        visible = self._visible[:rows, :end]
        inputs = {
            "input_ids": self._ids[:rows],
            "attention_mask": visible[:, None, None] if self._prepared else visible,
            "position_ids": self._positions[:rows],
        }
        logits = self._forward(inputs, self._cache)[:, -1]
        if self._graphs:
            self._logits[rows] = logits
        self._sample(rows, logits)

    def _forward(self, inputs: dict[str, Any], cache: Any, keep: Tensor | int = 1) -> Tensor:
        model: Any = self._model
        found = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=keep)
        logits: Tensor = found.logits
        return logits

    def _recorded(self, rows: int, seen: int) -> Replay:
        """Take one step by a new graph, which must compute what the kernels by themselves do."""
        room = self._cache.room
        state = [self._ids, self._positions, self._finished, self._step, self._column]
        before = [tensor.clone() for tensor in state]

        def again() -> None:
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)

        self._compute(rows, seen, room)
        expected = self._logits.pop(rows).float()
        again()
        replay = record(lambda: self._compute(rows, seen, room))
        again()
        replay()
        scale, found = expected.square().mean().sqrt(), self._logits.pop(rows)
        error = float((found.float() - expected).square().mean().sqrt() / scale)
        bound = ROUNDINGS * torch.finfo(found.dtype).eps
        if not error <= bound:  # also if it is not a number
            raise StageError(
                f"sampling.cuda_graphs: a graph of {rows} rows computes logits that differ from "
                f"those of the same kernels by {error:.2g} of their size, expected at most "
                f"{bound:.2g}. Fix: set sampling.cuda_graphs to false"
            )
        return replay


def record(step: Callable[[], None]) -> Replay:
    """Record the kernels of a step on the GPU, which has taken this step once before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_pool(), capture_error_mode="thread_local"):
        step()
    replay: Replay = graph.replay
    return replay


@cache
def _pool() -> Any:
    """The memory that all graphs of a process share: they never run at the same time."""
    return torch.cuda.graph_pool_handle()


def addresses(model: torch.nn.Module) -> tuple[int, ...]:
    """Where the weights are. A graph reads them there; they may have other values."""
    return tuple(parameter.data_ptr() for parameter in model.parameters())


def takes_prepared_mask(config: PreTrainedConfig, room: int) -> bool:
    """Whether one mask holds for all layers: no layer has a window that is shorter than the room.

    transformers takes a mask of four dimensions as it is. From one of two dimensions it makes a
    mask for each kind of layer, and waits for the GPU meanwhile.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    return kinds == {"full_attention"} and (window is None or window >= room)
