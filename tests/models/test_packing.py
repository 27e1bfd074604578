"""Attention over packed rows, beside transformers' eager attention over each row alone."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import varlen
from transformers import AutoConfig, AutoModelForCausalLM
from varlen_reference import varlen_attn

from rlhf_pipeline.models import packing
from rlhf_pipeline.models.forward import probe_capabilities
from rlhf_pipeline.models.packing import PACKED, one_kernel, use_packed_attention
from rlhf_pipeline.models.sequences import collate

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14]]
RESPONSES = [[20, 21, 22], [23, 24, 25, 26, 27], [28]]
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


@pytest.fixture(params=[None, 3], ids=["whole", "window of 3"])
def models(request, architecture):
    """A Mistral with packed attention, and the same model with eager attention."""
    fields = architecture("mistral") | {"attention_dropout": 0.0, "sliding_window": request.param}
    config = AutoConfig.for_model(**fields, vocab_size=300, pad_token_id=0)
    torch.manual_seed(1)
    packed = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    eager = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval().requires_grad_(False)
    eager.load_state_dict(packed.state_dict())
    eager.set_attn_implementation("eager")
    use_packed_attention(packed)
    assert packed.config._attn_implementation == PACKED
    return packed, eager


def alone(model, row):
    return model(input_ids=torch.tensor([row])).logits[0]


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "lfm2", "granitemoehybrid"])
def test_rows_are_not_packed_if_other_layers_would_cross_the_border(architecture, family):
    """However small the weights, with which the trial would find no difference."""
    fields = architecture(family) | {"initializer_range": 1e-3}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields, vocab_size=300))
    use_packed_attention(model)
    assert not probe_capabilities(model).packed


def test_a_row_sees_itself_alone_within_its_window(models):
    packed, eager = models
    assert probe_capabilities(packed).packed
    batch = collate(PROMPTS, RESPONSES, 0)
    found = packed(**batch.packed().model_inputs(), use_cache=False).logits[0]
    rows = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    for one, row in zip(found.split([len(row) for row in rows]), rows, strict=True):
        close(one, alone(eager, row))


def test_other_batches_keep_the_window(models):
    """With a mask, and without one."""
    packed, eager = models
    row = PROMPTS[0] + RESPONSES[0]
    close(alone(packed, row), alone(eager, row))
    inputs = collate(PROMPTS, RESPONSES, 0).model_inputs()
    real = inputs["attention_mask"].bool()
    close(packed(**inputs).logits[real], eager(**inputs).logits[real])


def test_answers_to_one_prompt_share_its_tokens(models):
    """Prompts A, A, B, A, A: each row of answers has the outputs that it has alone."""
    packed, eager = models
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[0]]
    responses = [*RESPONSES, [30], [31, 32, 33, 34, 35]]
    rows = collate(prompts, responses, 0, prompt_numbers=[4, 4, 2, 4, 4]).packed()
    assert rows.lengths == (7 + 3, 5, 2 + 1, 1, 5)
    found = packed(**rows.model_inputs(), use_cache=False).logits[0]
    assert len(found) == sum(rows.lengths) == rows.ids.numel()
    rest = found.split(rows.lengths)
    for one, prompt, response in zip(rest, prompts, responses, strict=True):
        expected = alone(eager, prompt + response)[-len(one) :]
        close(one, expected)
    before = [alone(eager, p + r)[len(p) - 1 : -1] for p, r in zip(prompts, responses, strict=True)]
    close(found[rows.before_response], torch.cat(before))
    last = torch.stack([one[-1] for one in rest])
    torch.testing.assert_close(found[rows.ends], last)


@pytest.mark.parametrize(
    ("responses", "numbers"),
    [
        ([[], [], []], [0, 0, 1]),  # nothing but the prompts
        ([[8], [8], [8]], None),  # equal tokens are no evidence: they may stand for two images
        ([[8], [8], [8]], [0, 1, 2]),
    ],
)
def test_other_rows_are_separate(responses, numbers):
    prompts = [[5, 6], [5, 6], [7]]
    rows = collate(prompts, responses, 0, prompt_numbers=numbers).packed()
    width = len(responses[0])
    assert rows.lengths == (2 + width, 2 + width, 1 + width) and rows.seen is None
    assert rows.ends.tolist() == [1 + width, 3 + 2 * width, 4 + 3 * width]


A100, H100, T4 = (8, 0), (9, 0), (7, 5)
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "dtype, capability, widths, expected",
    [
        (BF16, A100, (8, 64, 256), True),
        (BF16, H100, (20, 264), False),
        (BF16, T4, (64,), False),
        (torch.float32, H100, (64,), False),
        (BF16, None, (64,), False),  # a CPU
    ],
)
def test_flash_attention_is_used_where_it_runs(dtype, capability, widths, expected):
    assert {one_kernel(dtype, capability, width) for width in widths} == {expected}


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("width", [8, 16, 20])
@pytest.mark.parametrize("shared", [True, False])
def test_one_kernel_computes_what_the_loop_over_rows_computes(
    monkeypatch, heads, groups, window, width, shared
):
    """Output and gradients, with a kernel that is written from torch's documentation."""
    prompts = [[1, 2, 3], [1, 2, 3] if shared else [9, 9], [4, 5, 6, 7, 8], [9]]
    responses = [[11, 12], [13, 14, 15], [16], [17, 18, 19, 20]]
    numbers = [0, 0 if shared else 1, 2, 3]
    rows = collate(prompts, responses, 0, prompt_numbers=numbers).packed()
    assert (rows.seen is not None) is shared
    torch.manual_seed(1)
    module = SimpleNamespace(is_causal=True, num_key_value_groups=heads // groups)
    inputs = [torch.randn(1, count, rows.ids.numel(), width) for count in (heads, groups, groups)]
    calls = []

    def kernel(*arguments, **settings):
        calls.append(settings)
        return varlen_attn(*arguments, **settings)

    def results():
        own = [x.clone().requires_grad_() for x in inputs]
        output, _ = packing.packed_attention(
            module, *own, None, packed_rows=rows, scaling=0.3, sliding_window=window
        )
        weights = torch.arange(output.numel()).view(output.shape).sin()
        return [output, *torch.autograd.grad(output, own, weights)]

    expected = results()
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(packing, "one_kernel", lambda *_: True)
    for found, other in zip(results(), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-5, atol=2e-6)
    assert len(calls) == 1


@pytest.mark.parametrize(("logits", "packs"), [(slice(0, 1), True), (slice(None), False)])
def test_rounding_of_one_logit_is_no_leak_between_rows(models, logits, packs):
    """bf16 can move one logit of a pretrained model far; a leak moves all logits of a token."""
    packed, _ = models
    packed.packed_pass = False

    def note(module, args, kwargs):
        module.packed_pass = kwargs.get("packed_rows") is not None

    def enlarge(module, args, output):
        output = output.clone()
        if packed.packed_pass:
            output[0, -1, logits] += output.abs().amax() / 2
        return output

    packed.register_forward_pre_hook(note, with_kwargs=True)
    packed.get_output_embeddings().register_forward_hook(enlarge)
    assert probe_capabilities(packed).packed is packs
