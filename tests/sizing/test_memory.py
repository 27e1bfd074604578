"""Memory of models and stages, worked by hand; activations are compared with autograd's."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_pipeline.config.training import (
    FrozenDeepSpeedConfig,
    FrozenModel,
    LoRAConfig,
    TrainedModel,
    TrainedModelConfig,
)
from rlhf_pipeline.models.forward import install_logprob_head, response_logprobs
from rlhf_pipeline.models.lora import add_adapters
from rlhf_pipeline.models.packing import use_packed_attention
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.rl import logprobs
from rlhf_pipeline.sizing import memory
from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.memory import Numbers, Rows, frozen_model, trained_model
from rlhf_pipeline.sizing.models import Shape, find_model
from rlhf_pipeline.sizing.stages import plan_stage

SHAPE = Shape.of(
    {"model_type": "llama", "hidden_size": 100, "num_hidden_layers": 4, "num_attention_heads": 4,
     "intermediate_size": 400, "vocab_size": 1000, "tie_word_embeddings": True}
)  # fmt: skip
WEIGHTS = 740_900  # 4 * (4 * 100 * 100 + 3 * 100 * 400 + 2 * 100) + 1000 * 100 + 100
MATRICES = 4 * (4 * 100 * 100 + 3 * 100 * 400)
ADAPTERS = 4 * 16 * (4 * 200 + 3 * 500)  # of rank 16
ROWS = Rows(passes=2, computed=10, answers=5)
GPUS = Hardware(2, gpu_memory=2**30)
BUCKET = 50_000_000


def held(stage, precision="fp32", hardware=GPUS, **settings):
    """What a model holds, and the parts of its phases."""
    block = {
        "optimizer": {"learning_rate": 1e-3},
        "deepspeed": {"zero_stage": stage, "precision": precision} | settings.pop("deepspeed", {}),
    }
    config = TrainedModelConfig.model_validate(block | settings)
    return trained_model(TrainedModel("sft", config), SHAPE, hardware, ROWS)


@pytest.mark.parametrize(
    ("stage", "precision", "expected"),
    [
        (0, "fp32", {"weights": 4 * WEIGHTS, "optimizer": 8 * WEIGHTS}),
        (1, "fp32", {"weights": 4 * WEIGHTS, "optimizer": 4 * WEIGHTS,
                     "master copies": 2 * WEIGHTS}),
        (2, "bf16", {"weights": 2 * WEIGHTS, "optimizer": 4 * WEIGHTS,
                     "master copies": 2 * WEIGHTS}),
        (3, "bf16", {"weights": WEIGHTS, "optimizer": 4 * WEIGHTS, "master copies": 2 * WEIGHTS,
                     "gradients": 2 * WEIGHTS, "buckets": 2 * BUCKET}),
        (3, "fp32", {"weights": 2 * WEIGHTS, "optimizer": 4 * WEIGHTS, "master copies": 2 * WEIGHTS,
                     "gradients": 2 * WEIGHTS, "buckets": 4 * BUCKET}),
    ],
)  # fmt: skip
def test_two_ranks_share_what_the_stage_says(stage, precision, expected):
    memory, _ = held(stage, precision)
    assert memory.held == expected


@pytest.mark.parametrize(
    ("stage", "accumulate", "backward", "bucket", "step"),
    [
        # All sums, and those of the half in one tensor.
        (1, "fp32", 4 * WEIGHTS, 4, (4 + 2) * WEIGHTS),
        # Those of the half, which are one tensor already.
        (2, "fp32", 2 * WEIGHTS, 2, 2 * WEIGHTS),
        (3, "fp32", 0, 2, 2 * WEIGHTS),  # held; joined for the optimizer
        # Own gradients 2 bytes, joined 2, converted 4, for half of the weights.
        (1, "bf16", 2 * WEIGHTS, 2, (2 + 2 + 4) * WEIGHTS // 2),
    ],
)
def test_sums_of_bf16_gradients_have_four_bytes(stage, accumulate, backward, bucket, step):
    """On two ranks. Stage 1 reduces the sums, the others the gradients of a micro batch."""
    _, (first, second) = held(stage, "bf16", deepspeed={"accumulate": accumulate})
    assert first.parts["gradients"] == backward
    assert first.parts["buckets"] == bucket * BUCKET
    assert second.parts == {"gradients": step}


def test_offload_moves_states_and_gradients_to_main_memory():
    memory, _ = held(2, "bf16", deepspeed={"offload_optimizer": True})
    assert memory.held == {"weights": 2 * WEIGHTS}
    assert memory.main == {
        "optimizer": 4 * WEIGHTS,
        "master copies": 2 * WEIGHTS,
        "gradients": 4 * WEIGHTS // 2,
    }


@pytest.mark.parametrize("trains_rest", [False, True])
def test_lora_trains_adapters_and_perhaps_the_rest(trains_rest):
    rest = WEIGHTS - MATRICES if trains_rest else 0
    memory, _ = held(0, lora={"rank": 16, "train_rest": trains_rest})
    assert memory.held == {"weights": 4 * (WEIGHTS + ADAPTERS), "optimizer": 8 * (rest + ADAPTERS)}


def test_quantized_matrices_have_half_a_byte_and_their_scales():
    memory, _ = held(1, "bf16", lora={"rank": 16, "quantize": "nf4"})
    rest = 2 * (WEIGHTS - MATRICES + ADAPTERS)
    assert memory.held["weights"] == int(0.5625 * MATRICES) + rest


def test_a_frozen_model_is_whole_or_sharded():
    whole = FrozenDeepSpeedConfig(zero_stage=0, precision="bf16")
    sharded = FrozenDeepSpeedConfig(zero_stage=3, precision="bf16")
    for config, weights in ((whole, 2 * WEIGHTS), (sharded, WEIGHTS)):
        memory, _ = frozen_model(FrozenModel("ppo.reference", config), SHAPE, GPUS, ROWS)
        assert memory.held == {"weights": weights}


TRAINED = {"optimizer": {"learning_rate": 1e-3}}
SHARDED = TRAINED | {"deepspeed": {"zero_stage": 3, "precision": "bf16"}}
SFT = {"epochs": 1, "batch_size": 8, "micro_batch_tokens": 64}
SPLIT = {"sources": [{"name": "synthetic"}], "max_prompt_tokens": 16, "max_response_tokens": 8}


def ppo(**changes):
    """The parameters of a small PPO."""
    block = {
        "steps": 2, "rollout_batch_size": 8, "minibatch_size": 4, "micro_batch_tokens": 24,
        "sampling": {"max_response_tokens": 8}, "responses_per_prompt": 2,
        "actor": TRAINED, "critic": TRAINED,
    }  # fmt: skip
    return {"ppo": block | changes, "split": SPLIT}


def plan_ppo(**changes):
    return plan_stage("ppo", ppo(**changes), SHAPE, GPUS)


CACHE = 4 * 24 * 2 * 4 * 100 * 4
"""4 rows of a rank, 16 + 8 tokens, keys and values of 4 layers and 100 numbers in fp32."""


def sampling_of(memory):
    (phase,) = (phase for phase in memory.phases if phase.name == "generation")
    return phase


@pytest.mark.parametrize("pinned", [True, False])
def test_a_sharded_copy_answers_for_all_its_ranks(pinned):
    """Half of 640,000 weights and of the output layer, all embeddings; 4 layers are gathered."""
    hybrid = {"inference_tp_size": 2, "pin_parameters": pinned}
    memory = plan_ppo(generator="hybrid", hybrid=hybrid)
    sampling = sampling_of(memory)
    copy, gathered = 4 * (320_000 + 50_000 + 100_000), 4 * 640_000
    assert memory.models[0].held.get("sharded copy", 0) == (copy if pinned else 0)
    assert sampling.parts["gathered weights"] == gathered + (0 if pinned else copy)
    # 8 rows, of which a rank has half of the keys; a logit has 4 bytes, and 16 while it is sampled.
    assert sampling.parts["KV cache"] == CACHE
    assert sampling.parts["logits"] == 8 * 1000 * 20


@pytest.mark.parametrize("stage", ["ppo", "evaluate"])
def test_weights_are_gathered_whole_or_a_layer_at_a_time(stage):
    """Llama-2-7B in bf16: a layer, the embeddings, and a bucket that is fetched ahead."""
    evaluate = {"prompts": 8, "sampling": {"max_response_tokens": 8}}
    parameters = ppo(actor=SHARDED, critic=SHARDED) | {"sft": SHARDED | SFT, "evaluate": evaluate}
    found = {}
    for whole in (True, False):
        parameters[stage] = parameters[stage] | {"gather_for_generation": whole}
        memory = plan_stage(stage, parameters, find_model("llama-2-7b").shape, GPUS)
        found[whole] = sampling_of(memory).parts["gathered weights"]
    assert found == {True: 2 * 6_738_415_616, False: 2 * (202_375_168 + 131_072_000 + 50_000_000)}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("hardware", [GPUS, Hardware(2)])
def test_vllm_has_pages_and_a_copy_that_its_ranks_divide(ranks, hardware):
    """4 prompts of a rank, a page of 128 tokens each and one more; on a CPU, vLLM keeps them."""
    sampling = {"max_response_tokens": 8, "batch_size_per_gpu": 4}
    parameters = ppo(generator="vllm", hybrid={"inference_tp_size": ranks}, sampling=sampling)
    memory = plan_stage("ppo", parameters, SHAPE, hardware)
    pages = 2 * 4 * 100 // ranks * 4 * (1 + 4 * ranks) * 128
    own = {"vLLM's weights": 4 * WEIGHTS // ranks, "KV cache": pages}
    found = sampling_of(memory).parts if hardware.on_gpu else memory.models[0].held
    assert {part: found[part] for part in own} == own
    assert sampling_of(memory).parts["gathered weights"] == 4 * 640_000


@pytest.mark.parametrize(("generator", "copies"), [("transformers", 0), ("vllm", 1)])
def test_vllm_has_a_copy_of_the_policy_that_it_evaluates(generator, copies):
    evaluate = {"prompts": 8, "sampling": {"max_response_tokens": 8}, "precision": "fp32"}
    evaluate["generator"] = generator
    parameters = ppo() | {"sft": TRAINED | SFT, "evaluate": evaluate}
    memory = plan_stage("evaluate", parameters, SHAPE, GPUS)
    assert memory.models[0].held == {"weights": 4 * WEIGHTS}
    assert sampling_of(memory).parts.get("vLLM's weights", 0) == copies * 4 * WEIGHTS


@pytest.mark.parametrize(("size", "shared"), [(8, True), (4, False)])
def test_actor_and_critic_share_a_pass_if_short_responses_allow_it(size, shared):
    """A step of one update in passes of 24 tokens: of the longest responses, each row fills one."""
    both, alone = (
        plan_ppo(minibatch_size=size, **changes).phases[0].parts["activations"]
        for changes in ({}, {"advantage": "rloo", "critic": None})
    )
    assert both == (2 * alone if shared else alone)


def test_the_peak_is_the_largest_phase_above_what_is_held():
    memory = plan_ppo()
    assert sampling_of(memory).parts["KV cache"] == CACHE
    # Actor and critic: weights 4, half of 12 in states; reference and reward model: weights 4. A
    # critic has a vector of 100 weights besides, since the output layer is tied.
    assert memory.held == 28 * WEIGHTS + 10 * 100 + 4 * 100
    largest = max(sum(phase.parts.values()) for phase in memory.phases)
    assert memory.peak == 2**30 + memory.held + largest


def test_what_leaves_during_the_rollout_is_in_main_memory():
    """The states of the actor leave, and all of the critic (101 weights more), reference and reward
    model (100 more)."""
    plain, memory = plan_ppo(), plan_ppo(offload_during_rollout=True)
    left = sampling_of(plain).total - sampling_of(memory).total
    assert left == (6 + 4 + 10 + 4) * WEIGHTS + 10 * 100 + 4 * 100
    assert memory.main_of_node(2) - plain.main_of_node(2) == 2 * left
    assert memory.held == plain.held and memory.lower_bound == plain.lower_bound
    sampling = replace(memory, phases=(sampling_of(memory),))
    shown = sum(sum(sampling.parts_of(model).values()) for model in memory.models)
    assert sampling.libraries + shown == sampling.peak


def test_one_rank_reads_the_whole_model_that_zero_3_shards():
    """In main memory: libraries of two ranks, and all weights in bf16 once."""
    memory = plan_stage("sft", ppo() | {"sft": SHARDED | SFT}, SHAPE, GPUS)
    assert memory.main_of_node(2) == 2 * 300 * 2**20 + 2 * WEIGHTS


def test_a_single_pass_on_the_cpu_frees_activations_for_gradients():
    """In fp32, 4 bytes for each weight; several passes need both at once."""
    config = TrainedModelConfig.model_validate({"optimizer": {"learning_rate": 1e-3}})
    rows = [Rows(passes=passes, computed=5000, answers=5) for passes in (1, 2)]
    model = TrainedModel("sft", config)
    ((one,), (two,)) = (trained_model(model, SHAPE, Hardware(1), each)[1] for each in rows)
    assert two.total - one.total == 4 * WEIGHTS


TOKENS = 4 * 48
FIELDS = {
    "vocab_size": 300, "hidden_size": 128, "num_attention_heads": 4,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama": {"intermediate_size": 320, "num_key_value_heads": 4},
    "qwen2": {"intermediate_size": 320, "num_key_value_heads": 2},
    "opt": {"ffn_dim": 512, "word_embed_proj_dim": 128},
    "gpt2": {},
}


def test_logits_exist_in_the_chunks_that_the_plan_assumes():
    assert (memory.CHUNK, memory.GPU_CHUNK) == (logprobs.CHUNK, logprobs.GPU_CHUNK)


def saved_bytes(model_type, layers, dtype, *, lora):
    """Bytes of all tensors that the backward pass will read, without weights."""
    fields = FIELDS | FAMILIES[model_type]
    config = AutoConfig.for_model(model_type, num_hidden_layers=layers, **fields)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = config.dropout = 0.0
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    use_packed_attention(model)
    install_logprob_head(model)
    if lora:
        add_adapters(model, LoRAConfig(rank=8))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = []
    batch = collate([[5 + row] * 24 for row in range(4)], [[9] * 24] * 4, 0)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        response_logprobs(model, batch, vocab_size=300)
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in kept}
    return sum(own.nbytes() for place, own in storages.items() if place not in weights)


@pytest.mark.parametrize(
    ("model_type", "dtype", "lora"),
    [
        *((family, torch.float32, False) for family in FAMILIES),
        *((family, torch.bfloat16, False) for family in FAMILIES),
        ("llama", torch.float32, True),
    ],
)
def test_a_layer_keeps_what_autograd_saves(model_type, dtype, lora):
    """Frozen norms keep less; adapters keep 8 numbers for each of 7 matrices besides."""
    few, more = (saved_bytes(model_type, layers, dtype, lora=lora) for layers in (1, 3))
    fields = FIELDS | FAMILIES[model_type] | {"model_type": model_type, "num_hidden_layers": 3}
    numbers = Numbers(dtype.itemsize, on_gpu=False, norms_train=not lora)
    layer = memory.layer_bytes(Shape.of(fields), numbers) + 7 * 8 * 4 * lora
    assert layer * TOKENS == pytest.approx((more - few) / 2, rel=0.02)


def test_checkpointing_keeps_inputs_and_one_layer():
    shape = Shape.of(FIELDS | FAMILIES["opt"] | {"model_type": "opt", "num_hidden_layers": 10})
    numbers = Numbers(4, on_gpu=True)
    # fp32, d = 128, i = 512: norms 2 * 2d, attention 5d, ReLU i; last norm 2d; passing 2i + 2d.
    layer, rest = 4 * (4 * 128 + 5 * 128 + 512), 4 * (2 * 128 + 2 * 512 + 2 * 128)
    assert memory.saved_bytes(shape, numbers, 7, checkpointing=False) == 7 * (10 * layer + rest)
    inputs = 10 * 4 * 128
    assert memory.saved_bytes(shape, numbers, 7, checkpointing=True) == 7 * (layer + inputs + rest)
