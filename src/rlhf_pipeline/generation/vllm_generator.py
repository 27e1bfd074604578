"""Generation by vLLM, in the training processes: each rank has an engine for its own prompts.

With `hybrid.inference_tp_size` above 1, that many ranks hold one copy by vLLM's tensor parallelism
and answer their prompts together: their engines get the same requests, and each computes its part.

An engine keeps a copy of the weights in its own layout, refreshed before every rollout. The old
copy is spoiled first, because vLLM keeps what a transfer leaves out without an error. On a GPU it
sleeps between rollouts: the copy and the pages of keys and values give their memory back. vLLM
cannot sleep on a CPU. Written for vLLM 0.32.
"""

from __future__ import annotations

import os
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhf_pipeline.config.training import VLLM_BATCH, VLLM_PAGE, HybridConfig, SamplingConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.engine import free_memory
from rlhf_pipeline.distributed.world import World, on_gpu
from rlhf_pipeline.distributed.zero import DeepSpeedEngine, whole_weights
from rlhf_pipeline.errors import ConfigError, StageError
from rlhf_pipeline.generation.generator import Generator, Seed, own_group, together
from rlhf_pipeline.generation.records import Rollout
from rlhf_pipeline.models import PreTrainedModel
from rlhf_pipeline.models.forward import response_logprobs
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.runtime import heartbeat

if TYPE_CHECKING:
    from vllm import LLMEngine, SamplingParams

FIXED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""What every engine has."""
_ENGINES: dict[tuple[Any, ...], LLMEngine] = {}
"""The engines of this process, by what they were made for; policies take turns in one."""
PAGE = VLLM_PAGE  # vLLM's attention on a CPU prefers multiples of 32
PROBES = [[1, 2, 3], [4, 5, 6, 7, 8]]  # prompts that the parity is tried on
PROBE_SAMPLING = SamplingConfig(max_response_tokens=8)
PROBED = 16  # tokens that the parity probe needs


class VLLMGenerator:
    """Samples from a model, or from one in a DeepSpeed engine. All ranks construct it together.

    The engine answers `rows` prompts at a time; prompt and response have `longest` tokens at most.
    A process can have one engine on a GPU, so models of equal configurations, as those of an
    evaluation, share it: each call loads its own weights.

    Raises ConfigError if vLLM cannot make the engine, does not compute what the model's family
    computes, or would take gradients from the training; the message names `place`, the parameter
    that chose vLLM.
    """

    def __init__(
        self,
        policy: PreTrainedModel | DeepSpeedEngine,
        contract: TokenContract,
        *,
        rows: int,
        longest: int,
        place: str,
        world: World,
        hybrid: HybridConfig | None,
    ) -> None:
        self._contract, self._hybrid = contract, hybrid or HybridConfig()
        self.group = own_group(world, ranks := self._hybrid.inference_tp_size)
        self._model: PreTrainedModel = getattr(policy, "module", policy)
        trains = any(parameter.requires_grad for parameter in self._model.parameters())
        if trains and (found := os.environ.get("VLLM_BATCH_INVARIANT", "0")) != "0":
            raise ConfigError(
                f"VLLM_BATCH_INVARIANT: found {found}, expected none with {place}: vLLM replaces "
                "operators of torch in this process, and training needs their gradients. Fix: "
                "unset it"
            )
        self._sleeps, self._is_awake = on_gpu(), False
        longest = max(longest, PROBED)
        sizes = (ranks * rows, longest, ranks)
        kind = (self._model.config.to_json_string(), contract.vocab_size, PAGE, *sizes)
        if kind not in _ENGINES:
            _ENGINES[kind] = load_engine(self._model, contract, place, *sizes)
        self._engine = _ENGINES[kind]
        try:
            if not has_parity(self, policy, contract):
                raise ValueError("its log-probabilities are not those of the policy")
        except (ValueError, StageError) as error:  # also from vLLM, about names of weights
            del _ENGINES[kind]
            raise refusal(self._model, place) from error

    @together
    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        seeds: Sequence[Seed],
        prompt_numbers: Sequence[int] | None = None,
    ) -> Rollout:
        """As in `Generator`; raises StageError if the engine did not get all weights."""
        responses: list[list[int]] = [[] for _ in prompts]
        logprobs = torch.zeros(len(prompts), sampling.max_response_tokens)
        with self._awake() as engine:
            for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
                request = {"type": "token", "prompt_token_ids": list(prompt)}
                engine.add_request(str(row), request, parameters(sampling, seed, self._contract))
            while engine.has_unfinished_requests():
                heartbeat.report_progress()
                for finished in engine.step():
                    row, (answer,) = int(finished.request_id), finished.outputs
                    responses[row] = tokens = list(answer.token_ids)
                    own = [
                        at[token].logprob for token, at in zip(tokens, answer.logprobs, strict=True)
                    ]
                    logprobs[row, : len(own)] = torch.tensor(own)
        if logprobs.isnan().any():
            raise StageError(
                "vLLM: found weights that are NaN, or that the transfer before this rollout left "
                "out, expected those of the policy. Fix: set the generator to transformers"
            )
        sequences = collate(
            prompts, responses, self._contract.pad_id, prompt_numbers=prompt_numbers
        )
        return Rollout(sequences, logprobs[:, : sequences.response_ids.shape[1]])

    @contextmanager
    def same_weights(self) -> Iterator[None]:
        """Calls of `generate` in the block transfer the weights once, and share prefixes."""
        with self._awake():
            self._is_awake = True
            try:
                yield
            finally:
                self._is_awake = False

    @contextmanager
    def _awake(self) -> Iterator[LLMEngine]:
        """The engine with the weights of the policy, and with no key or value of other weights."""
        if self._is_awake:
            yield self._engine
            return
        engine, weights = self._engine, {"weights_iterator": self._weights()}
        if self._sleeps:
            free_memory()  # what torch keeps of the tensors of training
            engine.wake_up(tags=["weights"])
        engine.apply_model(spoil)
        engine.collective_rpc("reload_weights", kwargs=weights)
        if self._sleeps:
            engine.wake_up(tags=["kv_cache"])
        engine.reset_prefix_cache()
        # On a CPU, compiling the little that vLLM compiles there takes longer than it saves.
        stance = "default" if self._sleeps else "force_eager"
        try:
            with torch.compiler.set_stance(stance):
                yield engine
        finally:
            if self._sleeps:
                engine.sleep(level=2)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights for the engine, whose vocabulary is not padded."""
        tables = (self._model.get_input_embeddings(), self._model.get_output_embeddings())
        padded = {path for path, module in self._model.named_modules() if module in tables}
        for name, weight in whole_weights(self._model, self._hybrid.tp_gather_partition_size):
            is_padded = name.rpartition(".")[0] in padded
            yield name, weight[: self._contract.vocab_size] if is_padded else weight


def load_engine(
    model: PreTrainedModel, contract: TokenContract, place: str, rows: int, longest: int, ranks: int
) -> LLMEngine:
    """An engine for the model's family, without weights, split over `ranks`; on a GPU, it sleeps.

    Raises ConfigError if vLLM makes none.
    """
    for name, value in FIXED["environment"].items():
        os.environ.setdefault(name, value)
    from vllm import EngineArgs, LLMEngine

    config = deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.vocab_size = contract.vocab_size  # no other token can be sampled
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        arguments = EngineArgs(
            model=folder,
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=longest,
            max_num_seqs=rows,
            tensor_parallel_size=ranks,
            max_num_batched_tokens=max(VLLM_BATCH, rows),
            block_size=PAGE,
            num_gpu_blocks_override=1 + rows * ceil(longest / PAGE),  # vLLM keeps one
            # Without a compiler on a CPU; and graphs of BLOOM would keep what is mended below.
            enforce_eager=not on_gpu() or config.model_type == "bloom",
            enable_sleep_mode=on_gpu(),
            **deepcopy(FIXED["engine"]),
        )
        try:
            settings = arguments.create_engine_config()
            if settings.model_config.using_transformers_backend():
                raise refusal(model, place)  # it would change the model's own class
            engine = LLMEngine.from_vllm_config(settings, disable_log_stats=True)
        except ValueError as error:  # such as heads that the ranks cannot divide, too few pages
            raise ConfigError(
                f"{place}: vLLM makes no engine for {rows} rows of {longest} tokens by this "
                f"{config.model_type} on {ranks} ranks: {str(error).partition('. ')[0]}. Fix: set "
                "it to transformers"
            ) from error
    if config.model_type == "bloom":
        engine.apply_model(_mend_bloom)
    engine.engine_core._finalizer.detach()  # it would end the process group of the training
    if on_gpu():
        engine.sleep(level=2)
    return engine


def _mend_bloom(model: nn.Module) -> None:
    """vLLM's BLOOM looks for the head in the model below it, and has another GELU."""
    from vllm.model_executor.models.utils import AutoWeightsLoader

    def load(weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        return AutoWeightsLoader(model).load_weights(weights)

    vars(model)["load_weights"] = load
    for module in model.modules():
        if hasattr(module, "gelu_impl"):
            module.gelu_impl = nn.GELU(approximate="tanh")


def spoil(model: nn.Module) -> None:
    """Make NaN of all that an engine computes with its weights, until they are loaded again.

    On a CPU, vLLM replaces a matrix by a function with a packed copy.
    """
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data.fill_(torch.nan)
        if packed := vars(module).get("cpu_linear"):
            vars(module)["cpu_linear"] = partial(_spoiled, packed)


def _spoiled(packed: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return packed(*inputs) * torch.nan


def refusal(model: PreTrainedModel, place: str) -> ConfigError:
    """The error for a family that vLLM cannot sample from while it trains."""
    return ConfigError(
        f"{place}: found vllm, expected another generator for the family "
        f"{model.config.model_type}, which vLLM computes differently or not by itself. Fix: set "
        "it to transformers"
    )


def parameters(sampling: SamplingConfig, seed: Seed, contract: TokenContract) -> SamplingParams:
    """vLLM's parameters for one response."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    found = SamplingParams(
        max_tokens=sampling.max_response_tokens,
        stop_token_ids=list(contract.eos_ids),
        ignore_eos=True,  # those of the contract only
        seed=int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1),
        logprobs=0,  # of the sampled token only
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
    found.temperature = sampling.temperature  # the constructor would raise one below 0.01
    return found


@torch.no_grad()
def has_parity(generator: Generator, policy: nn.Module, contract: TokenContract) -> bool:
    """Whether a generator's log-probabilities are those of the policy, on two short prompts.

    A backend that reads a model in its own way may ignore a property of its family, for example its
    positions, and sample from another distribution without an error. All ranks call this together.
    Rounding is allowed, a tenth of what another prompt would change.
    """
    rollout = generator.generate(PROBES, PROBE_SAMPLING, [(0,), (1,)])
    rows, mask = rollout.sequences, rollout.sequences.real_mask
    responses = [ids[own].tolist() for ids, own in zip(rows.response_ids, mask, strict=True)]
    own, other = (
        response_logprobs(
            policy,
            collate(prompts, responses, contract.pad_id).to(next(policy.parameters()).device),
            vocab_size=contract.vocab_size,
        ).cpu()[mask]
        for prompts in (PROBES, PROBES[::-1])
    )
    error = (rollout.logprobs[mask] - own).abs().mean()
    return bool(error <= 0.1 * (other - own).abs().mean())
