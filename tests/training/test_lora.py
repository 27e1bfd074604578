"""LoRA in DeepSpeed's engines: the weights that train, and the exports.

Two real ranks run this file as a program, all settings in one launch.
"""

import copy
import json
import sys
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from rank_fixtures import write_table
from safetensors.torch import load_file

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.preferences import DPOConfig
from rlhf_pipeline.config.training import RewardModelConfig, SFTConfig
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.models.scalar_head import load_scores
from rlhf_pipeline.runtime.job import LaunchedJob

LORA = {"rank": 4, "alpha": 8.0}
MODEL = {"optimizer": {"learning_rate": 1e-2, "warmup_fraction": 0.0}, "lora": LORA}
ROWS = {
    "id": ["a", "b", "c", "d"],
    "prompt_ids": [[5, 6, 7], [8], [9, 10], [11]],
    "response_ids": [[20, 1], [21, 22, 1], [23, 1], [24, 25, 1]],
    "chosen_ids": [[20, 1], [21, 1], [22, 1], [23, 1]],
    "rejected_ids": [[23, 24, 1], [25, 1], [26, 1], [27, 1]],
}
ROWS["loss_mask"] = [[True] * len(row) for row in ROWS["response_ids"]]
IDS = torch.tensor([[5, 6, 7, 20, 1]])
SETTINGS = {
    "sft 2": ("sft", {"deepspeed": {"zero_stage": 2}}),
    "sft 3 bf16": (
        "sft",
        {"deepspeed": {"zero_stage": 3, "precision": "bf16"}, "gradient_checkpointing": True},
    ),
    "sft 3 rest": ("sft", {"deepspeed": {"zero_stage": 3}, "lora": LORA | {"train_rest": True}}),
    "reward_model 3": ("reward_model", {"deepspeed": {"zero_stage": 3}}),
    "ppo": ("ppo", {"deepspeed": {"zero_stage": 3}, "gradient_checkpointing": True}),
}


def block(stage, model):
    """Parameters for two optimizer steps, or for two steps of PPO."""
    model = MODEL | model
    if stage == "ppo":
        return PPOConfig.model_validate(
            {
                "steps": 2, "rollout_batch_size": 4, "minibatch_size": 4,
                "micro_batch_tokens": 32, "evaluations": 1,
                "sampling": {"max_response_tokens": 4}, "ema": {"decay": 0.5},
                "actor": model, "critic": MODEL | {"deepspeed": {"zero_stage": 2}},
            }
        )  # fmt: skip
    supervised = model | {
        "epochs": 2,
        "batch_size": 4,
        "micro_batch_tokens": 16,
        "evaluations": 1,
    }
    return {"sft": SFTConfig, "reward_model": RewardModelConfig, "dpo": DPOConfig}[
        stage
    ].model_validate(supervised)


def main(inputs: dict[str, str], folder: Path) -> None:
    """Train with each setting; save the weights and outputs of each last model."""
    from rlhf_pipeline.distributed.world import join
    from rlhf_pipeline.distributed.zero import whole_state_dict
    from rlhf_pipeline.models.lora import WithoutAdapters
    from rlhf_pipeline.training import ppo, reward_model, sft
    from rlhf_pipeline.training.best_models import BestModels

    def output(model):
        with torch.no_grad():
            inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
            found = (
                model(**inputs, scores_to_keep=5)
                if directory.name.startswith("reward")
                else model(**inputs).logits
            )
        return found.float().clone()

    def finish(self, last):
        live = {
            "trained": output(last),
            "start": output(WithoutAdapters(last)),
            "weights": whole_state_dict(last.module),
        }
        if world.rank == 0:
            torch.save(live, directory / f"live-{self.export.name}.pt")
        return exported(self, last)

    world = join(1, timeout_s=600)
    exported, BestModels.finish = BestModels.finish, finish
    for name, (stage, model) in SETTINGS.items():
        directory = folder / name
        directory.mkdir(exist_ok=True)
        wanted = {
            "sft": ("base_model", "demonstrations"),
            "reward_model": ("sft_model", "comparisons"),
        }
        paths = {
            key: Path(inputs[key])
            for key in wanted.get(stage, ("prompts", "sft_model", "reward_model"))
        }
        job = LaunchedJob(
            stage,
            "f",
            1,
            {stage: block(stage, model).model_dump(mode="json")},
            paths,
            {},
            directory,
            600.0,
        )
        {"sft": sft, "reward_model": reward_model, "ppo": ppo}[stage].main(job)


@pytest.fixture(scope="session")
def inputs(ppo_inputs, tmp_path_factory):
    """PPO's inputs, and four rows for SFT and the reward model."""
    from rlhf_pipeline.data.token_contract import TokenContract

    contract = TokenContract.read(ppo_inputs["sft_model"])
    rows = write_table(pa.table(ROWS), tmp_path_factory.mktemp("rows"), contract)
    return ppo_inputs | {
        "base_model": ppo_inputs["sft_model"],
        "demonstrations": rows,
        "comparisons": rows,
    }


@pytest.fixture(scope="module")
def results(on_ranks, inputs):
    return on_ranks(__file__, inputs)


def load(stage, checkpoint, precision="fp32"):
    return (
        load_scores(checkpoint, precision)
        if stage == "reward_model"
        else load_policy(checkpoint, precision)
    )


def precision_of(name):
    return "bf16" if "bf16" in name else "fp32"


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SETTINGS if "rest" not in name])
def test_the_base_keeps_every_bit_and_every_adapter_changes(results, inputs, name):
    found = torch.load(results / name / "live-export.pt")["weights"]
    start = load_policy(inputs["sft_model"], precision_of(name)).state_dict()
    own = {
        key.removeprefix("classifier.").replace(".base_layer.", "."): value
        for key, value in found.items()
    }
    for key, value in start.items():
        if key in own:  # a reward model has no lm_head
            assert torch.equal(own[key].cpu(), value), key
    adapters = {key: value for key, value in found.items() if ".lora_B." in key}
    assert len(adapters) == 14  # two layers of seven matrices; B starts at zero
    assert all(value.any() for value in adapters.values())


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name for name in SETTINGS if "rest" not in name and not name.startswith("reward")]
)
def test_without_its_adapters_the_model_is_the_start_bit_by_bit(results, inputs, name):
    """Not for a reward model: its head has trained and is not part of an adapter."""
    live = torch.load(results / name / "live-export.pt")
    with torch.no_grad():
        expected = load_policy(inputs["sft_model"], precision_of(name))(
            IDS, attention_mask=torch.ones_like(IDS)
        ).logits
    assert torch.equal(live["start"], expected.float())
    assert not torch.allclose(live["trained"], live["start"], atol=1e-2)


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_the_export_equals_the_trained_model(results, name):
    stage, live = SETTINGS[name][0], torch.load(results / name / "live-export.pt")
    arguments = {"attention_mask": torch.ones_like(IDS)}
    model = load(stage, results / name / "export", precision_of(name))
    with torch.no_grad():
        if stage == "reward_model":
            found = model(input_ids=IDS, **arguments, scores_to_keep=5)
        else:
            found = model(IDS, **arguments).logits.float()
    # In bf16 the export rounds the sum of matrix and adapter to 8 bits.
    torch.testing.assert_close(
        found, live["trained"], rtol=0, atol=1e-5 if precision_of(name) == "fp32" else 0.1
    )


@pytest.mark.long
def test_the_export_of_the_average_contains_the_average_of_the_adapters(results):
    with torch.no_grad():
        found = load_policy(results / "ppo" / "export" / "ema", "fp32")(
            IDS, attention_mask=torch.ones_like(IDS)
        ).logits
    torch.testing.assert_close(
        found, torch.load(results / "ppo" / "live-ema.pt")["trained"], rtol=0, atol=1e-5
    )
    assert not torch.allclose(
        found, torch.load(results / "ppo" / "live-export.pt")["trained"], atol=1e-3
    )
    assert (results / "ppo" / "export" / "ema" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.long
def test_the_export_has_the_engine_s_precision(results):
    for name, dtype in (("sft 3 bf16", torch.bfloat16), ("sft 2", torch.float32)):
        for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
            assert {
                weight.dtype for weight in load_file(results / name / "export" / file).values()
            } == {dtype}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "auto", "base"),
    [("sft 2", "AutoModelForCausalLM", "base_model"), ("ppo", "AutoModelForCausalLM", "sft_model"),
     ("reward_model 3", "AutoModelForSequenceClassification", "sft_model")],
)  # fmt: skip
def test_peft_loads_the_adapter_in_the_export(results, inputs, name, auto, base):
    import transformers
    from peft import PeftModel

    adapter = results / name / "export" / "adapter"
    assert (
        json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == base
    )
    options = {"num_labels": 1} if auto.endswith("Classification") else {}
    model = getattr(transformers, auto).from_pretrained(
        inputs[base], dtype=torch.float32, **options
    )
    read = PeftModel.from_pretrained(model, adapter).state_dict()
    live = torch.load(results / name / "live-export.pt")["weights"]
    for key, value in live.items():
        key = key.removeprefix("classifier.")
        key = key.replace("score.", "score.modules_to_save.default.")
        assert torch.equal(read[f"base_model.model.{key}"], value.cpu()), key


@pytest.mark.long
def test_saved_models_contain_adapters_only(results):
    (best,) = (results / "sft 2" / "checkpoints").glob("best-*")
    assert sorted(path.name for path in best.iterdir() if path.name != "README.md") == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    assert not (results / "sft 3 rest" / "export" / "adapter").exists()


@pytest.mark.long
def test_train_rest_trains_the_weights_without_adapters(results, inputs):
    found = torch.load(results / "sft 3 rest" / "live-export.pt")["weights"]
    start = load_policy(inputs["base_model"], "fp32").state_dict()
    for key, value in start.items():
        same = torch.equal(
            found.get(key, found.get(key.replace(".weight", ".base_layer.weight"))), value
        )
        assert same == (key not in found), key


@pytest.mark.long
def test_ppo_has_no_engine_for_the_reference(results):
    """A separate reference would have one, as the actor is sharded; the reward model is whole."""
    assert json.loads((results / "ppo" / "deepspeed.json").read_text()).keys() == {
        "actor",
        "critic",
    }


def setup_of(engine, task, config, world):
    """What `train_step` needs, with all rows in one batch of two micro batches."""
    from rlhf_pipeline.distributed.batches import Rows
    from rlhf_pipeline.training.supervised import Setup

    rows = Rows.of(pa.table(ROWS))
    return Setup(
        engine=engine, task=task, config=config.model_copy(update={"micro_batch_tokens": 32}),
        training=rows, validation=rows, world=world, seed=1, best=None, guard=None,
        checkpoints=None, done=0,
    )  # fmt: skip


def train_one_step(setup):
    """The metrics of a step, and the names of the weights that it changed."""
    from rlhf_pipeline.training.supervised import train_step

    module = setup.engine.module
    before = copy.deepcopy(module.state_dict())
    metrics = train_step(setup, 1)
    after = module.state_dict()
    return metrics, {name for name, value in after.items() if not torch.equal(before[name], value)}


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "bloom"])
@pytest.mark.parametrize("deepspeed", [{"zero_stage": 0}, {"zero_stage": 2, "precision": "bf16"}])
def test_one_step_of_sft_changes_b_only(make_model, world, family, deepspeed):
    """B starts at zero, so the first gradient of A is zero."""
    from rlhf_pipeline.data.token_contract import TokenContract
    from rlhf_pipeline.distributed.engine import train_engine
    from rlhf_pipeline.training.sft import SFTTask

    checkpoint, config = make_model(family), block("sft", {"deepspeed": deepspeed})
    engine = train_engine(partial(load_policy, checkpoint), config, 1)
    task = SFTTask(TokenContract.read(checkpoint))
    _, changed = train_one_step(setup_of(engine, task, config, world))
    assert changed == {name for name in engine.module.state_dict() if ".lora_B." in name}


def test_one_step_of_the_reward_model_changes_its_head_and_b_only(make_model, world):
    """B starts at zero, so the first gradient of A is zero."""
    from rlhf_pipeline.data.token_contract import TokenContract
    from rlhf_pipeline.distributed.engine import train_engine, untrained
    from rlhf_pipeline.training.reward_model import RewardModelTask

    checkpoint, config = make_model("gpt2"), block("reward_model", {})
    engine = train_engine(partial(untrained, checkpoint), config, 1)
    task = RewardModelTask(TokenContract.read(checkpoint), config)
    _, changed = train_one_step(setup_of(engine, task, config, world))
    names = engine.module.state_dict()
    assert changed == {
        name for name in names if ".lora_B." in name or name == "classifier.score.weight"
    }


def test_dpo_starts_at_log_2_and_its_reference_does_not_change(make_model, world):
    from rlhf_pipeline.data.token_contract import TokenContract
    from rlhf_pipeline.distributed.engine import train_engine
    from rlhf_pipeline.training.dpo import DPOTask

    checkpoint, config = make_model("opt"), block("dpo", {"deepspeed": {"zero_stage": 2}})
    engine = train_engine(partial(load_policy, checkpoint), config, 2)
    task = DPOTask(TokenContract.read(checkpoint), None, config)
    setup = setup_of(engine, task, config, world)
    metrics, changed = train_one_step(setup)
    assert metrics["dpo/loss"] == pytest.approx(0.6931472, rel=1e-6)
    assert changed == {name for name in engine.module.state_dict() if ".lora_B." in name}
    metrics, _ = train_one_step(setup)
    assert metrics["dpo/loss"] < 0.69


def test_ppo_trains_adapters_and_the_head_of_the_critic(inputs, world, tmp_path):
    from ppo_runs import scored_rollout

    from rlhf_pipeline.data.token_contract import common_contract
    from rlhf_pipeline.models.lora import WithoutAdapters
    from rlhf_pipeline.training.experience import make_experience
    from rlhf_pipeline.training.ppo_metrics import rollout_metrics
    from rlhf_pipeline.training.ppo_setup import load_ppo_models
    from rlhf_pipeline.training.ppo_update import update_models

    paths = {name: inputs[name] for name in ("prompts", "sft_model", "reward_model")}
    config = block("ppo", {"deepspeed": {"zero_stage": 1}})
    job = LaunchedJob("ppo", "f", 1, {}, paths, {}, tmp_path, 600.0)
    models = load_ppo_models(job, config, common_contract(paths), world)
    assert isinstance(models.reference, WithoutAdapters)
    assert models.reference.trained is models.actor
    before = copy.deepcopy(models.critic.module.state_dict())
    for step in (1, 2):
        scored = scored_rollout(models, ROWS["prompt_ids"], config, step)
        kl = rollout_metrics(scored, config, world)["objective/kl_k3"]
        assert kl == 0 if step == 1 else kl > 0
        experience = make_experience(scored, config, kl_coef=0.1, world=world)
        update_models(models, experience, config, world, key=(1, 1), kl_coef=0.1, train_actor=True)
    after = models.critic.module.state_dict()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {name for name in after if ".lora_" in name or "score" in name}
    arguments = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    start = load_policy(inputs["sft_model"], "fp32")(**arguments).logits
    assert torch.equal(models.reference(**arguments).logits, start)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="4-bit weights need a GPU")
def test_adapters_trained_on_a_4_bit_base_are_merged_into_the_whole_base(make_model, on_ranks):
    pytest.importorskip("bitsandbytes", reason="the extra `quantization` is not installed")
    checkpoint = make_model("llama")
    argument = {"quantized": checkpoint}
    results = on_ranks(__file__, argument, ranks=1, accelerator="cuda")  # the tests have the CPU
    weights = load_file(results / "export" / "model.safetensors")
    start = load_policy(checkpoint, "bf16").state_dict()
    assert weights.keys() <= start.keys() and {weight.dtype for weight in weights.values()} == {
        torch.bfloat16
    }
    assert torch.equal(weights["model.embed_tokens.weight"], start["model.embed_tokens.weight"])


def train_quantized(checkpoint: Path, folder: Path) -> None:
    """Train adapters on a 4-bit base for one step, and export the model."""
    from rlhf_pipeline.data.token_contract import TokenContract
    from rlhf_pipeline.distributed.engine import train_engine
    from rlhf_pipeline.distributed.world import join
    from rlhf_pipeline.models.loading import load_tokenizer
    from rlhf_pipeline.training.best_models import BestModels
    from rlhf_pipeline.training.sft import SFTTask

    world = join(0, timeout_s=600)
    config = block("sft", {"deepspeed": {"precision": "bf16"}, "lora": LORA | {"quantize": "nf4"}})
    read = partial(load_policy, checkpoint)
    engine = train_engine(read, config, 1)
    assert engine.module.model.layers[0].self_attn.q_proj.base_layer.weight.dtype == torch.uint8
    task = SFTTask(TokenContract.read(checkpoint))
    _, changed = train_one_step(setup_of(engine, task, config, world))
    assert changed == {name for name in engine.module.state_dict() if ".lora_B." in name}
    job = LaunchedJob("sft", "f", 1, {}, {"base_model": checkpoint}, {}, folder, 600.0)
    best = BestModels(job, world, load_tokenizer(checkpoint), config, read)
    best.offer(engine, 1, 1.0, {})
    best.finish()


if __name__ == "__main__":
    given, results_folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    if "quantized" in given:
        train_quantized(Path(given["quantized"]), results_folder)
    else:
        main(given, results_folder)
