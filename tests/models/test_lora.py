"""Adapters in models of every family: trained, frozen, stored and merged weights."""

import copy
import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_pipeline.config.training import LoRAConfig
from rlhf_pipeline.errors import ArtifactError, ConfigError
from rlhf_pipeline.models import lora
from rlhf_pipeline.models.forward import network_of
from rlhf_pipeline.models.loading import freeze, load_policy
from rlhf_pipeline.models.lora import WithoutAdapters, add_adapters, merged, trained_names
from rlhf_pipeline.models.scalar_head import load_scores

IDS = torch.tensor([[5, 6, 7, 20, 21, 1], [8, 9, 10, 11, 23, 24]])
CONFIG = LoRAConfig(rank=4, alpha=6.0)


def logits(policy):
    return policy(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits


def train_a_little(model):
    """Add random numbers to all trainable weights, as a few steps would."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)


def adapted(checkpoint, config=CONFIG, precision="fp32"):
    model = load_policy(checkpoint, precision).eval()
    add_adapters(model, config)
    return model


def store(model, folder):
    parameters = dict(getattr(model, "classifier", model).named_parameters())
    weights = {name: parameters[name].detach() for name in trained_names(model)}
    lora.write_adapter(model, weights, "sft_model", folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(make_model, family):
    return make_model(family)


def test_adapters_change_nothing_at_the_start_and_the_start_is_kept(checkpoint):
    start = logits(freeze(load_policy(checkpoint, "fp32")))
    model = adapted(checkpoint)
    assert torch.equal(logits(model), start)
    reference = WithoutAdapters(model)
    train_a_little(model)
    assert not torch.allclose(logits(model), start, atol=1e-2)
    assert torch.equal(logits(reference), start)
    assert not logits(reference).requires_grad and logits(model).requires_grad
    assert not torch.allclose(logits(model), start, atol=1e-2)


def test_merged_policy_and_peft_policy_equal_the_trained_one(checkpoint, tmp_path):
    model = adapted(checkpoint)
    train_a_little(model)
    folder = store(model, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert torch.equal(logits(PeftModel.from_pretrained(base, folder).eval()), logits(model))
    plain = merged(load_policy(checkpoint, "fp32").eval().double(), CONFIG, folder)
    assert plain.state_dict().keys() == load_policy(checkpoint, "fp32").state_dict().keys()
    # In float64: in float32, sums in another order move a logit by some 2e-5 in some families.
    for one in (plain, model):
        network_of(one).set_experts_implementation("eager")  # the grouped product has no float64
    torch.testing.assert_close(logits(plain), logits(model.double()), rtol=0, atol=1e-6)


def test_a_scalar_head_is_stored_with_the_adapter(checkpoint, tmp_path):
    model = load_scores(checkpoint, "fp32", new_head=True).eval()
    add_adapters(model, CONFIG)
    train_a_little(model)
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    scores = model(**inputs, scores_to_keep=6)[:, -1]
    folder = store(model, tmp_path / "adapter")
    plain = merged(load_scores(checkpoint, "fp32", new_head=True).eval(), CONFIG, folder)
    torch.testing.assert_close(plain(**inputs, scores_to_keep=6)[:, -1], scores, rtol=0, atol=1e-5)
    auto = AutoModelForSequenceClassification
    base = auto.from_pretrained(checkpoint, num_labels=1, dtype=torch.float32)
    base.config.pad_token_id = 0
    again = PeftModel.from_pretrained(base, folder).eval()(**inputs).logits[:, 0]
    assert torch.equal(again, scores)
    assert json.loads((folder / "adapter_config.json").read_text())["modules_to_save"] == ["score"]


def test_only_adapters_and_the_scalar_head_train(checkpoint, family):
    trained = trained_names(adapted(checkpoint))
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    linear = [
        name
        for name, module in load_policy(checkpoint, "fp32").named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and name not in ("lm_head", "embed_out")
    ]
    # In each layer, peft adapts two weights of Qwen3-Next's experts in place of the three matrices
    # of its shared expert.
    other = len([name for name in linear if ".shared_expert." in name]) // 3
    assert other == (2 if family == "qwen3_next" else 0)
    assert len(trained) == 2 * (len(linear) - other)
    scores = load_scores(checkpoint, "fp32", new_head=True)
    add_adapters(scores, CONFIG)
    assert [name for name in trained_names(scores) if "lora" not in name] == ["score.weight"]


def test_train_rest_freezes_only_the_adapted_matrices(checkpoint, tmp_path):
    config = CONFIG.model_copy(update={"train_rest": True})
    model = adapted(checkpoint, config)
    names = {name for name, _ in model.named_parameters()}
    adapted_matrices = {name for name in names if name.endswith(".base_layer.weight")}
    assert names - set(trained_names(model)) == adapted_matrices
    train_a_little(model)
    folder = store(model, tmp_path / "adapter")
    plain = merged(load_policy(checkpoint, "fp32").eval(), config, folder)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def llama(make_model):
    return make_model("llama")


def test_only_named_targets_are_adapted(llama):
    model = adapted(llama, LoRAConfig(rank=2, target_modules=["q_proj", "layers.1.mlp.down_proj"]))
    layers = {name.split(".lora_")[0] for name in trained_names(model)}
    expected = ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.down_proj")
    assert layers == {f"model.layers.{name}" for name in expected}


@pytest.mark.parametrize("target", ["q_prj", "lm_head", "embed_tokens", "proj", "score"])
def test_an_unknown_target_is_refused_with_the_known_ones(llama, target):
    """A scalar head is none."""
    model = load_scores(llama, "fp32", new_head=True)
    with pytest.raises(ConfigError) as refusal:
        add_adapters(model, LoRAConfig(target_modules=["q_proj", target]))
    message = str(refusal.value)
    assert message.startswith(f"lora.target_modules: found {target!r}")
    assert message.endswith(
        ", expected all-linear or linear layers of llama: "
        "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )


def test_adapters_have_the_precision_of_the_model(llama):
    found = {parameter.dtype for parameter in adapted(llama, precision="bf16").parameters()}
    assert found == {torch.bfloat16}


def test_the_stored_adapter_is_small_and_contains_no_path(llama, tmp_path):
    folder = store(adapted(llama), tmp_path / "adapter")
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "sft_model"
    assert settings["target_modules"] == [
        f"{name}_proj" for name in ("down", "gate", "k", "o", "q", "up", "v")
    ]
    assert (settings["r"], settings["lora_alpha"], settings["inference_mode"]) == (4, 6.0, True)
    assert str(tmp_path) not in json.dumps(settings) and str(llama) not in json.dumps(settings)
    # Two layers, each with four 32 x 32 matrices in the attention and three 32 x 64 in the MLP:
    # 2 * 4 * (4 * 64 + 3 * 96) = 4352.
    weights = load_file(folder / "adapter_model.safetensors").values()
    assert sum(weight.numel() for weight in weights) == 4352


def test_an_adapter_of_another_recipe_is_refused(llama, tmp_path):
    folder = store(adapted(llama, LoRAConfig(target_modules=["q_proj"])), tmp_path / "adapter")
    message = r"adapter_model\.safetensors does not match the model .*v_proj"
    with pytest.raises(ArtifactError, match=message):
        merged(load_policy(llama, "fp32"), LoRAConfig(target_modules=["q_proj", "v_proj"]), folder)


def test_a_pass_without_adapters_changes_no_gradient(llama):
    model = adapted(llama)
    train_a_little(model)
    twin = copy.deepcopy(model)
    logits(twin).square().sum().backward()
    first = logits(model)
    logits(WithoutAdapters(model))
    first.square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None) == ("lora" not in name)
        assert one.grad is None or torch.equal(one.grad, other.grad)
