"""Bytes that a forward pass keeps for its backward pass, and those of passes without one.

The terms are the tensors that autograd saves in transformers 5 with the packed attention of
`rlhf_pipeline.models.packing`; tests/sizing/test_activations.py compares them with those tensors.
"""

from dataclasses import dataclass

from rlhf_pipeline.sizing.shape import Shape

CHUNK = 2**25
"""Elements of the logits that exist at a time in float32: `rlhf_pipeline.rl.logprobs`."""
HEAP, CHURNED_HEAP = 1.6, 2.6
"""On a CPU, what a training pass allocates and frees takes this many times its size. glibc's heap
keeps the gaps that one tensor leaves, and the next ones have other sizes. The second factor is for
activations with adapters, whose short-lived tensors lie between those that are kept, and for the
weights that ZeRO-3 gathers layer by layer. Both are measured: see docs/planning.md."""
FEED_FORWARD = {"opt": 1, "bloom": 2, "gpt_neox": 2, "gpt2": 5, "gpt_neo": 5, "gptj": 5, "phi": 5}
"""Tensors of the width of the feed-forward network that a layer keeps, by family: one for ReLU,
two for GELU, five for its approximation by tanh, which transformers computes in steps. Others: four
for a gate."""


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


def of_layer(shape: Shape, numbers: Numbers) -> int:
    """Bytes for each token that one layer keeps."""
    size, queries, keys = numbers.size, shape.queries, shape.keys
    feed_forward = FEED_FORWARD.get(shape.model_type, 4) * size * shape.intermediate
    if numbers.on_gpu and size < 4:
        attention = size * (2 * queries + 2 * keys)
    else:  # in float32, and the rows are joined to a tensor for the output layer
        attention = 4 * (2 * queries + 2 * keys) + size * queries
    return 2 * of_norm(shape, numbers) + attention + feed_forward


def of_norm(shape: Shape, numbers: Numbers) -> int:
    """Bytes for each token that a norm keeps, with its output."""
    if not shape.is_gated:
        return 2 * numbers.size * shape.hidden
    # An RMS norm keeps its input in float32, its scaled input and its output.
    return shape.hidden * (4 + numbers.size * (2 if numbers.norms_train else 1))


def kept(shape: Shape, numbers: Numbers, tokens: int, *, checkpointing: bool) -> int:
    """Bytes that a forward pass of so many tokens keeps, and those of one layer's backward pass.

    With checkpointing, it keeps the input of each layer, and one whole layer at a time.
    """
    layer = of_layer(shape, numbers)
    inputs = numbers.size * shape.hidden
    layers = layer + shape.layers * inputs if checkpointing else shape.layers * layer
    rest = of_norm(shape, numbers) + passing(shape, numbers)
    return int(numbers.heap * tokens * (layers + rest))


def passing(shape: Shape, numbers: Numbers) -> int:
    """Bytes for each token while one layer computes without keeping anything."""
    return numbers.size * (2 * shape.intermediate + 2 * shape.hidden)


def of_logits(shape: Shape, numbers: Numbers, tokens: int, *, trains: bool) -> int:
    """Bytes for the log-probabilities of so many tokens: one chunk of logits in float32.

    A pass that trains the output layer adds its gradient in float32; on a CPU, one in half
    precision converts the weight.
    """
    chunk = 4 * min(CHUNK, tokens * shape.vocab)
    converts = numbers.size < 4 and not numbers.on_gpu
    return chunk + 4 * shape.vocab * shape.embedding * (trains + converts)
