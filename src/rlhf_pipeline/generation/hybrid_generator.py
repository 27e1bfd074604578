"""Generation from a sharded copy of the policy, refreshed before every rollout.

Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053) by the plan of the model's family in
transformers: a rank holds some output columns of one matrix and the matching input columns of the
next one, and the ranks add up their partial results. So the ranks of a group answer the same
prompts together, each reading its share of the weights.
"""

import fnmatch
from collections.abc import Sequence
from functools import partial
from math import gcd

import torch
from torch import Tensor, nn

from rlhf_pipeline.config.training import HybridConfig, SamplingConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.distributed.zero import DeepSpeedEngine, whole_weights, without_weights
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.generation.generator import Group, Seed, own_group, together
from rlhf_pipeline.generation.records import Rollout
from rlhf_pipeline.generation.transformers_generator import TransformersGenerator
from rlhf_pipeline.models import PreTrainedModel

COLUMNS, ROWS, COLUMNS_AND_GATHER = "colwise", "rowwise", "colwise_gather_output"
STYLES = {COLUMNS: 0, ROWS: 1, COLUMNS_AND_GATHER: 0}
"""The sharded dimension of a weight (out, in), by the name of its style in a plan."""
WHOLE = ("embedding_", "replicated")
"""Beginnings of styles whose weights every rank keeps whole: a lookup reads few of them."""


class HybridGenerator:
    """Turns the weights in training into a model for generation, within the same processes.

    Weights of any ZeRO stage are gathered once for a rollout and sharded over groups of
    `inference_tp_size` ranks. Each group answers the prompts of its ranks together.
    """

    def __init__(
        self,
        policy: PreTrainedModel | DeepSpeedEngine,
        contract: TokenContract,
        hybrid: HybridConfig,
        world: World,
    ) -> None:
        self._model: PreTrainedModel = getattr(policy, "module", policy)
        self._contract = contract
        self._config = hybrid
        self.group = own_group(world, hybrid.inference_tp_size)
        copy = ShardedCopy(self._model, self.group)  # an error shows before training
        self._pinned = copy if hybrid.pin_parameters else None

    @together
    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        seeds: Sequence[Seed],
        prompt_numbers: Sequence[int] | None = None,
    ) -> Rollout:
        copy = self._pinned or ShardedCopy(self._model, self.group)
        copy.refresh(self._config.tp_gather_partition_size)
        sampler = TransformersGenerator(copy.model, self._contract)
        return sampler.generate(prompts, sampling, seeds, prompt_numbers)


class ShardedCopy:
    """The copy, on this rank.

    Raises ConfigError if the family has no plan, or a matrix cannot be divided by the group's size.
    """

    def __init__(self, source: PreTrainedModel, group: Group) -> None:
        self._source, self._group = source, group
        self.model = without_weights(source)
        self._styles = styles(self.model, group.size)
        self._dims: dict[str, int | None] = {}
        """The sharded dimension of each parameter; None: it is whole."""
        for path, module in self.model.named_modules():
            style = self._styles.get(path)
            for name, parameter in list(module.named_parameters(recurse=False)):
                self._allocate(module, name, parameter, path, style)
            for name, _ in list(module.named_buffers(recurse=False)):
                module.register_buffer(name, source.get_submodule(path).get_buffer(name))
            # A method of this object would tie it to its model until a garbage collection.
            if group.size > 1 and style in (ROWS, COLUMNS_AND_GATHER):
                module.register_forward_hook(partial(_added if style == ROWS else _joined, group))

    @torch.no_grad()
    def refresh(self, layers: int) -> None:
        """Copy the weights of the source, `layers` of its layers gathered at a time."""
        for name, whole in whole_weights(self._source, layers):
            dim, path = self._dims[name], name.rpartition(".")[0]
            if dim is not None:
                whole = whole.chunk(self._group.size, dim)[self._group.rank]
            elif name.endswith(".bias") and self._styles.get(path) == ROWS:
                whole = whole / self._group.size
            self.model.get_parameter(name).copy_(whole)

    def _allocate(
        self, module: nn.Module, name: str, parameter: Tensor, path: str, style: str | None
    ) -> None:
        shape, ranks = list(parameter.shape), self._group.size
        dim = None if style is None else STYLES[style]
        if parameter.dim() == 1:  # a bias: of the columns, or added by every rank in equal parts
            dim = 0 if style in (COLUMNS, COLUMNS_AND_GATHER) else None
        if dim is not None:
            if shape[dim] % ranks:
                raise ConfigError(
                    f"hybrid.inference_tp_size: found {ranks}, expected a divisor of "
                    f"{shape[dim]}, dimension {dim} of {path}.{name}"
                )
            shape[dim] //= ranks
        own = torch.empty(shape, dtype=self._source.dtype, device=self._source.device)
        module.register_parameter(name, nn.Parameter(own, requires_grad=False))
        self._dims[f"{path}.{name}".lstrip(".")] = dim


def _added(group: Group, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    torch.distributed.all_reduce(output, group=group.collectives)
    return output


def _joined(group: Group, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    parts = [torch.empty_like(output) for _ in range(group.size)]
    torch.distributed.all_gather(parts, output.contiguous(), group=group.collectives)
    return torch.cat(parts, dim=-1)


def styles(model: PreTrainedModel, size: int) -> dict[str, str]:
    """The style of each sharded module, by its path.

    A vocabulary that `size` ranks cannot divide stays whole. Raises ConfigError if the family has
    no plan, or one with another style, or if the ranks cannot divide the heads of keys and values.
    """
    plan = dict(model._tp_plan or {})
    family = model.config.model_type
    if not plan:
        raise ConfigError(
            f"hybrid.inference_tp_size: {family} has no tensor-parallel plan in transformers. "
            "Fix: set it to 1"
        )
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % size:
        raise ConfigError(
            f"hybrid.inference_tp_size: found {size}, expected a divisor of the {heads} heads "
            f"of keys and values of this {family}. Fix: set it to {gcd(heads, size)}"
        )
    found = {}
    for path, module in model.named_modules():
        style = next((s for pattern, s in plan.items() if fnmatch.fnmatchcase(path, pattern)), None)
        if style == COLUMNS_AND_GATHER and getattr(module, "out_features", size) % size:
            continue
        if style in STYLES:
            found[path] = style
        elif style is not None and not style.startswith(WHOLE):
            raise ConfigError(
                f"hybrid.inference_tp_size: found the style {style} in the plan of {family}, "
                f"expected {', '.join(STYLES)}. Fix: set it to 1"
            )
    return found
