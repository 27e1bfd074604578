"""Memory of a model in training or frozen, on one rank.

The terms follow DeepSpeed 0.19.8 with the settings of `distributed.engine`, and what
autograd saves in transformers 5 with packed attention. docs/planning.md compares them with measured
peaks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf_pipeline.config.block import Precision
from rlhf_pipeline.config.training import (
    BUCKET,
    LIVE,
    VLLM_BATCH,
    VLLM_PAGE,
    FrozenModel,
    HybridConfig,
    StageModel,
    TrainedModel,
)
from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.models import Shape

BYTES: Mapping[Precision, int] = {"fp32": 4, "bf16": 2}
NF4 = 0.5 + 4 / 64
"""Bytes of a 4-bit weight of bitsandbytes: half a byte, and a float32 scale for 64 weights."""

CHUNK, GPU_CHUNK = 2**25, 2**27
"""Elements of the logits that exist at a time in float32: `rlhf_pipeline.rl.logprobs`."""
HEAP, CHURNED_HEAP = 1.6, 2.6
"""On a CPU, what a training pass allocates takes this many times its size, for glibc's heap keeps
the gaps. The second factor is for activations with adapters, and for weights that ZeRO-3 gathers
layer by layer. Both are measured: see docs/planning.md."""
FEED_FORWARD = {"opt": 1, "bloom": 2, "gpt_neox": 2, "gpt2": 5, "gpt_neo": 5, "gptj": 5, "phi": 5}
"""Tensors of the width of the feed-forward network that a layer keeps, by family: one for ReLU, two
for GELU, five for its approximation by tanh. Others: four for a gate."""

Parts = dict[str, int]
"""Bytes by component: weights, gradients, master copies, optimizer, ..."""


@dataclass(frozen=True)
class Numbers:
    """How a model computes."""

    size: int
    """Bytes of a number: 4 in fp32, else 2."""
    on_gpu: bool
    norms_train: bool = True
    """False with LoRA: a norm whose weight is frozen keeps less."""

    @property
    def heap(self) -> float:
        """Memory for each byte that a training pass allocates."""
        if self.on_gpu:
            return 1.0
        return HEAP if self.norms_train else CHURNED_HEAP


@dataclass(frozen=True)
class ModelMemory:
    """One model on one rank."""

    name: str
    """Its parameter block, such as ppo.actor."""
    held: Parts
    """From its loading to the end of the stage."""
    main: Parts = field(default_factory=dict)
    """In main memory beside a GPU (offload), for the whole stage or for a phase."""
    gradients: int = 0
    """While it trains."""
    loading: int = 0
    """In main memory of the first rank alone: ZeRO-3 shards what that rank has read."""


@dataclass(frozen=True)
class Phase:
    """What one model needs for a while, beyond what all models hold."""

    name: str
    model: str
    parts: Parts
    away: dict[str, Parts] = field(default_factory=dict)
    """What is held, but in main memory meanwhile (`ppo.offload_during_rollout`), by model."""

    @property
    def total(self) -> int:
        away = sum(sum(parts.values()) for parts in self.away.values())
        return sum(self.parts.values()) - away


@dataclass(frozen=True)
class Lengths:
    """The tokens of a training row."""

    prompt: int
    response: int
    """Of both answers for comparisons."""
    copies: int = 1
    """Times that a row contains its prompt: 2 for comparisons."""

    @property
    def row(self) -> int:
        return self.copies * self.prompt + self.response


@dataclass(frozen=True)
class Rows:
    """Rows of one pass on one rank."""

    passes: int
    """Forward passes of an optimizer step (gradient accumulation)."""
    computed: int
    """Tokens of a pass that are computed: both answers of a comparison share their prompt."""
    answers: int
    """Tokens of a pass that are predicted: the responses."""


def layer_bytes(shape: Shape, numbers: Numbers) -> int:
    """Bytes for each token that one layer keeps."""
    size, queries, keys = numbers.size, shape.queries, shape.keys
    feed_forward = FEED_FORWARD.get(shape.model_type, 4) * size * shape.intermediate
    if numbers.on_gpu and size < 4:
        attention = size * (2 * queries + 2 * keys)
    else:  # in float32, and the rows are joined to a tensor for the output layer
        attention = 4 * (2 * queries + 2 * keys) + size * queries
    return 2 * norm_bytes(shape, numbers) + attention + feed_forward


def norm_bytes(shape: Shape, numbers: Numbers) -> int:
    """Bytes for each token that a norm keeps, with its output."""
    if not shape.is_gated:
        return 2 * numbers.size * shape.hidden
    # An RMS norm keeps its input in float32, its scaled input and its output.
    return shape.hidden * (4 + numbers.size * (2 if numbers.norms_train else 1))


def saved_bytes(shape: Shape, numbers: Numbers, tokens: int, *, checkpointing: bool) -> int:
    """Bytes that a forward pass of so many tokens keeps, and those of one layer's backward pass.
    With checkpointing, it keeps the input of each layer, and one whole layer at a time."""
    layer = layer_bytes(shape, numbers)
    inputs = numbers.size * shape.hidden
    layers = layer + shape.layers * inputs if checkpointing else shape.layers * layer
    rest = norm_bytes(shape, numbers) + transient_bytes(shape, numbers)
    return int(numbers.heap * tokens * (layers + rest))


def transient_bytes(shape: Shape, numbers: Numbers) -> int:
    """Bytes for each token while one layer computes without keeping anything."""
    return numbers.size * (2 * shape.intermediate + 2 * shape.hidden)


def logits_bytes(shape: Shape, numbers: Numbers, tokens: int, *, trains: bool) -> int:
    """Bytes for the log-probabilities of so many tokens: one chunk of logits in float32, with the
    gradient of an output layer that trains, and with a copy of it in half precision on a CPU."""
    chunk = 4 * min(GPU_CHUNK if numbers.on_gpu else CHUNK, tokens * shape.vocab)
    converts = numbers.size < 4 and not numbers.on_gpu
    return chunk + 4 * shape.vocab * shape.embedding * (trains + converts)


def parameters(model: StageModel, shape: Shape) -> int:
    """Weights without adapters."""
    return shape.body + shape.hidden if model.scalar else shape.parameters


def trained_parameters(model: TrainedModel, shape: Shape) -> int:
    """Weights that train: all, or adapters and the scalar head."""
    lora, whole = model.config.lora, parameters(model, shape)
    if lora is None:
        return whole
    rest = whole - shape.matrices if lora.train_rest else shape.hidden * model.scalar
    return shape.adapters(lora) + rest


def trained_model(
    model: TrainedModel, shape: Shape, hardware: Hardware, rows: Rows
) -> tuple[ModelMemory, list[Phase]]:
    """A model in training: what it holds, and its phases; `rows` are its micro batches."""
    config, name = model.config, model.block
    deepspeed, ranks, on_gpu = config.deepspeed, hardware.world, hardware.on_gpu
    size, stage = BYTES[deepspeed.precision], deepspeed.zero_stage
    total = BYTES[deepspeed.accumulate] if deepspeed.precision == "bf16" else size
    compact = total > size and stage < 3  # the sums of the share are one tensor, on the device
    trained = trained_parameters(model, shape)
    weights = weight_bytes(model, shape)
    share = -(-trained // ranks) if stage else trained
    held: Parts = {"weights": weights // ranks if stage == 3 else weights}
    states: Parts = {"optimizer": 8 * share}
    if stage:  # also of weights in float32
        states["master copies"] = 4 * share
    if model.averaged:
        states["average"] = 4 * share
    main: Parts = {}
    if deepspeed.offload_parameters and on_gpu:
        main["weights"] = held.pop("weights")
    if deepspeed.offload_optimizer and on_gpu:
        main |= states | {"gradients": (4 if compact else 4 + total) * share}
    else:
        held |= states
    # Stage 3 has its own buffers at all times, the others during the backward pass.
    gradients = total * (share if stage >= 2 else trained)
    width = total if stage == 1 else size * (stage > 1)  # stage 1 reduces the sums
    bucket = width * (BUCKET if on_gpu else min(BUCKET, trained))
    if stage == 3:
        held |= {"gradients": gradients, "buckets": bucket}
        if deepspeed.offload_optimizer and on_gpu:
            del held["gradients"]  # they are in main memory
    numbers = Numbers(size, on_gpu, config.lora is None or config.lora.train_rest)
    backward: Parts = {
        "gradients": 0 if stage == 3 else gradients,
        "activations": saved_bytes(
            shape, numbers, rows.computed, checkpointing=config.gradient_checkpointing
        ),
        "buckets": bucket,
    }
    if not model.scalar:
        backward["logits"] = logits_bytes(shape, numbers, rows.answers, trains=numbers.norms_train)
    if stage == 3 and (ranks > 1 or deepspeed.offload_parameters):
        gaps = 1.0 if on_gpu else CHURNED_HEAP
        backward["gathered weights"] = int(gaps * min(weights, LIVE * size))
    # The optimizer step converts this rank's gradients to one tensor in float32.
    flat = 0 if stage == 0 or deepspeed.offload_optimizer else share * (4 + total * (total < 4))
    flat = 4 * share * (stage == 1) if compact else flat
    memory = ModelMemory(name, held, main, gradients, weights if stage == 3 and on_gpu else 0)
    if not on_gpu:  # the heap keeps what the backward pass has freed
        if rows.passes == 1:  # gradients take the place of the activations that are done
            backward["activations"] -= min(backward["activations"], backward["gradients"])
        backward["gradients"] += flat
        return memory, [Phase("update", name, backward)]
    own = gradients if compact else total * share if backward["gradients"] else 0
    step: Parts = {"gradients": own + flat}
    return memory, [Phase("backward", name, backward), Phase("step", name, step)]


def weight_bytes(model: TrainedModel, shape: Shape) -> int:
    """Bytes of all weights of a model in training, adapters included."""
    size, lora = BYTES[model.config.deepspeed.precision], model.config.lora
    whole = parameters(model, shape)
    if lora is None:
        return size * whole
    adapters = shape.adapters(lora)
    if lora.quantize is None:
        return size * (whole + adapters)
    return int(NF4 * shape.matrices) + size * (whole - shape.matrices + adapters)


def frozen_model(
    model: FrozenModel, shape: Shape, hardware: Hardware, rows: Rows
) -> tuple[ModelMemory, list[Phase]]:
    """A frozen model: its weights, and a forward pass."""
    config, name = model.config, model.block
    assert config.precision is not None
    size = BYTES[config.precision]
    weights = size * parameters(model, shape)
    is_sharded = config.zero_stage == 3
    loading = weights if is_sharded and hardware.on_gpu else 0
    held = {"weights": weights // hardware.world if is_sharded else weights}
    main: Parts = {}
    if config.offload_parameters and hardware.on_gpu:
        main, held = held, {}
    numbers = Numbers(size, hardware.on_gpu)
    return ModelMemory(name, held, main, loading=loading), [
        forward(name, shape, numbers, rows, scalar=model.scalar, sharded=is_sharded)
    ]


def forward(
    name: str, shape: Shape, numbers: Numbers, rows: Rows, *, scalar: bool, sharded: bool
) -> Phase:
    """A forward pass without gradients."""
    parts = {"activations": rows.computed * transient_bytes(shape, numbers)}
    if not scalar:
        parts["logits"] = logits_bytes(shape, numbers, rows.answers, trains=False)
    if sharded:
        parts["gathered weights"] = gathered_layer_bytes(shape, numbers)
    return Phase("scoring", name, parts)


def gathered_layer_bytes(shape: Shape, numbers: Numbers) -> int:
    """Bytes of the weights that are whole while ZeRO-3 gathers one layer after another."""
    layer = shape.matrices // shape.layers + shape.vocab * shape.embedding
    return numbers.size * min(BUCKET + layer, shape.parameters)


def sharded_copy(shape: Shape, numbers: Numbers, ranks: int) -> int:
    """Bytes of a rank's part of `rollout.sharded_copy`: each rank keeps all input embeddings."""
    head = shape.vocab * shape.embedding
    return numbers.size * ((shape.matrices + head) // ranks + shape.embeddings)


def generation(
    name: str,
    shape: Shape,
    numbers: Numbers,
    rows: int,
    lengths: Lengths,
    gathered: int,
    together: int = 1,
) -> Phase:
    """Sampling by the model of the parameter block `name`, `rows` at a time. `gathered` bytes of
    weights exist for it alone; `together` ranks share the key-value heads and answer all their
    prompts."""
    prompts = together * rows
    cache_size = numbers.size if numbers.on_gpu else 4
    room = rows * (lengths.prompt + lengths.response)
    parts = {
        "KV cache": 2 * shape.layers * shape.keys * cache_size * room,
        "activations": prompts * lengths.prompt * transient_bytes(shape, numbers),
        # Scaled logits, probabilities, and those in whole blocks, each in float32.
        "logits": prompts * shape.vocab * (numbers.size + 4 * 4),
    }
    if gathered:
        parts["gathered weights"] = gathered
    if not numbers.on_gpu:  # `rollout.repacked_weights` copies the matrices
        parts["packed weights"] = numbers.size * (shape.matrices + shape.vocab * shape.embedding)
    return Phase("generation", name, parts)


def vllm_generation(
    name: str, shape: Shape, numbers: Numbers, rows: int, lengths: Lengths, hybrid: HybridConfig
) -> Phase:
    """As `generation`, by `generation.vllm_generator`: it has its own copy of the weights and pages
    of keys and values, and reads the prompts in batches."""
    ranks = hybrid.inference_tp_size
    layers = min(hybrid.tp_gather_partition_size, shape.layers)
    pages = 1 + ranks * rows * -(-(lengths.prompt + lengths.response) // VLLM_PAGE)
    tokens = min(ranks * rows * lengths.prompt, max(VLLM_BATCH, ranks * rows))
    parts = {
        "vLLM's weights": numbers.size * shape.parameters // ranks,
        "KV cache": 2 * shape.layers * shape.keys // ranks * numbers.size * pages * VLLM_PAGE,
        "gathered weights": numbers.size * layers * shape.matrices // shape.layers,
        "activations": tokens * transient_bytes(shape, numbers),
        # Logits, scaled ones, their logarithms and those sorted, each in float32.
        "logits": ranks * rows * shape.vocab * 4 * 4,
    }
    return Phase("generation", name, parts)
