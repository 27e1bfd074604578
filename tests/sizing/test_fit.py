"""Whether a stage fits, and the change that makes it fit."""

import pytest

from rlhf_pipeline.config.stages import BLOCKS
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.sizing.fit import changed, find_fit, fits, micro_batch_tokens
from rlhf_pipeline.sizing.hardware import GIB, Hardware, named
from rlhf_pipeline.sizing.models import find_model
from rlhf_pipeline.sizing.stages import plan_stage

SHAPE = find_model("opt-1.3b").shape
SPLIT = {"sources": [{"name": "synthetic"}], "max_prompt_tokens": 256, "max_response_tokens": 256}


def sft(**settings):
    """SFT in bf16: 2 + 4 + 8 bytes for each of 1.316e9 weights are 17.2 GiB, gradients 2.5."""
    block = {
        "epochs": 1, "batch_size": 32, "micro_batch_tokens": 16384,
        "optimizer": {"learning_rate": 1e-5}, "deepspeed": {"precision": "bf16"},
    }  # fmt: skip
    return {"sft": block | settings, "split": SPLIT}


def gpus(count, size):
    return Hardware(count, gpu_memory=size * GIB, main_memory=500 * GIB)


@pytest.mark.parametrize(
    ("tokens", "hardware", "changes"),
    [
        # A quarter of the activations is enough for 32 GB, as ZeRO would be.
        (16384, gpus(1, 32), {"sft.micro_batch_tokens": 4096}),
        (512, gpus(2, 17), {"sft.deepspeed.zero_stage": 2}),
        (512, gpus(1, 16), {"sft.deepspeed.offload_optimizer": True}),  # ZeRO needs several ranks
        # 16 bytes for each weight in main memory are 20 GiB.
        (512, Hardware(1, gpu_memory=16 * GIB, main_memory=10 * GIB), {"sft.lora.rank": 16}),
    ],
)
def test_the_cheapest_change_that_is_enough_comes_first(tokens, hardware, changes):
    fit = find_fit("sft", sft(micro_batch_tokens=tokens), SHAPE, hardware)
    assert fit.changes == changes and not fit.fits and fit.after.is_met


def test_what_does_not_suffice_is_named():
    """Offload of 13 B weights fits the GPU, and not 64 GiB of main memory."""
    hardware = Hardware(1, gpu_memory=80 * GIB, main_memory=64 * GIB)
    deepspeed = {"precision": "bf16", "accumulate": "bf16", "offload_optimizer": True}
    settings = sft(micro_batch_tokens=512, deepspeed=deepspeed)
    fit = find_fit("sft", settings, find_model("opt-13b").shape, hardware)
    assert str(fit.before).startswith("found ") and fit.before.found > 150 * GIB
    assert " of main memory on each node, expected at most 58.9 GiB" in str(fit.before)
    assert fit.after.kind == fit.before.kind and fit.after.is_met
    rank = find_fit("sft", sft(micro_batch_tokens=512), SHAPE, gpus(1, 16)).before
    assert str(rank).endswith(" GiB, expected at most 14.7 GiB")


def test_a_sum_of_changes_has_none_that_is_not_needed():
    hardware = gpus(8, 24)
    shape = find_model("opt-13b").shape
    changes = find_fit("sft", sft(), shape, hardware).changes
    assert len(changes) > 1
    parameters = changed(sft(), changes)
    assert fits(plan_stage("sft", parameters, shape, hardware), hardware)
    for name in changes:
        rest = {other: value for other, value in changes.items() if other != name}
        memory = plan_stage("sft", changed(sft(), rest), shape, hardware)
        assert not fits(memory, hardware), name


def test_nothing_makes_175_billion_fit_one_small_gpu():
    """Offload would need 350 GB of main memory for the weights alone."""
    hardware = Hardware(1, gpu_memory=16 * GIB, main_memory=128 * GIB)
    fit = find_fit("sft", sft(), find_model("opt-175b").shape, hardware)
    assert fit.changes is None
    assert fit.fix == "use more or larger GPUs, or a smaller model"
    assert fit.after.found < fit.before.found / 2  # the least that any change needs


@pytest.mark.parametrize("value", [3, None])
def test_changed_leaves_the_original_alone(value):
    before = {"ppo": {"actor": {"lora": None}}}
    after = changed(before, {"ppo.actor.lora.rank": value})
    assert after == {"ppo": {"actor": {"lora": {"rank": value}}}}
    assert before == {"ppo": {"actor": {"lora": None}}}


TRAINED = {"optimizer": {"learning_rate": 1e-5}, "deepspeed": {"precision": "bf16"}}
SUPERVISED = TRAINED | {"epochs": 1, "batch_size": 512, "micro_batch_tokens": "auto"}
ON_PROMPTS = {
    "steps": 1, "rollout_batch_size": 512, "minibatch_size": 512, "micro_batch_tokens": "auto",
    "responses_per_prompt": 2, "sampling": {"max_response_tokens": 256, "batch_size_per_gpu": 8},
    "actor": TRAINED,
}  # fmt: skip
AUTOMATIC = {
    **dict.fromkeys(("sft", "reward_model", "dpo", "kto"), SUPERVISED),
    **dict.fromkeys(("rejection", "iterative_dpo"), SUPERVISED),
    "ppo": ON_PROMPTS | {"critic": TRAINED},
    "grpo": ON_PROMPTS,
    "distill": ON_PROMPTS | {"teacher": {"path": "facebook/opt-1.3b"}},
}


def of_stage(stage, **settings):
    """The blocks of a run in which one stage trains."""
    return dict.fromkeys(BLOCKS) | {"split": SPLIT, stage: AUTOMATIC[stage] | settings}


@pytest.mark.parametrize("stage", AUTOMATIC)
@pytest.mark.parametrize(("model", "hardware"), [("opt-1.3b", "1x80"), ("qwen2.5-0.5b", "2x16")])
def test_auto_is_the_largest_power_of_two_that_fits(stage, model, hardware):
    shape, machine = find_model(model).shape, named(None, hardware)

    def fits_with(tokens):
        trial = changed(of_stage(stage), {f"{stage}.micro_batch_tokens": tokens})
        return fits(plan_stage(stage, trial, shape, machine), machine)

    (number,) = micro_batch_tokens(of_stage(stage), shape, machine).values()
    assert number in [2**power for power in range(9, 18)]
    assert fits_with(number) and not fits_with(2 * number)


@pytest.mark.parametrize(("batch_size", "expected"), [(8, 4096), (9, 8192), (512, 32768)])
def test_auto_needs_no_more_than_the_batch_of_a_rank(batch_size, expected):
    """Rows of 512 tokens, on one GPU with room for 32,768. If not even one row fits, it is one."""
    blocks = of_stage("sft", batch_size=batch_size)
    assert micro_batch_tokens(blocks, SHAPE, gpus(1, 80)) == {"sft": expected}
    assert micro_batch_tokens(of_stage("ppo"), SHAPE, gpus(1, 16)) == {"ppo": 1}


@pytest.mark.parametrize(
    ("shape", "hardware", "unknown"),
    [(None, gpus(1, 80), "size of base_model"), (SHAPE, Hardware(1), "memory of the GPUs")],
)
def test_auto_is_refused_where_the_plan_knows_too_little(shape, hardware, unknown):
    message = f"sft.micro_batch_tokens: found auto, expected a known {unknown}. Fix: set a number"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        micro_batch_tokens(of_stage("sft"), shape, hardware)
    assert micro_batch_tokens(dict.fromkeys(BLOCKS) | sft(), shape, hardware) == {}
