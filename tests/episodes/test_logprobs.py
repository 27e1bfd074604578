"""Numbers of answers over several turns, against transformers on the same tokens."""

import pytest
import torch
from episodes_fixtures import ALL, Scripted, call, rows
from transformers import AutoModelForCausalLM

from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.generation.generator import row_seeds
from rlhf_pipeline.models.forward import probe_capabilities, response_logprobs
from rlhf_pipeline.models.loading import load_policy

SAID = [
    [call("add", a=2, b=3), " It is 5."],
    [" I do not know."],
    [call("add", a=1, b=1), call("add", a=2, b=1), " 3"],
]


@pytest.mark.parametrize(("family", "packed"), [("llama", True), ("qwen3_next", False)])
def test_log_probabilities_of_actions_are_those_of_transformers(make, make_model, family, packed):
    folder = make_model(family, max_position_embeddings=512)
    own = make(tools=ALL)
    rollout = own.play(
        Scripted(own.reader, SAID), rows(3), SamplingConfig(max_response_tokens=300),
        row_seeds(1, 1, range(3)), (1, 1),
    )  # fmt: skip
    policy, sequences = load_policy(folder, "fp32").eval(), rollout.sequences
    assert probe_capabilities(policy).packed == packed
    size = own.reader.contract.vocab_size
    with torch.no_grad():
        found = response_logprobs(policy, sequences, vocab_size=size)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    counted = 0
    for row in range(3):
        prompt = sequences.prompt_ids[row][sequences.prompt_mask[row]]
        response = sequences.response_ids[row][sequences.real_mask[row]]
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, :, :size].double()
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, response[:, None])[:, 0]
        actions = sequences.action_mask[row][sequences.real_mask[row]]
        torch.testing.assert_close(
            found[row, : len(response)][actions].double(), logprobs[actions], rtol=0, atol=1e-5
        )
        counted += int(actions.sum())
    texts = [text for said in SAID for text in said]
    expected = own.reader.tokenizer([f"{text}<|end|>" for text in texts])["input_ids"]
    assert counted == sum(map(len, expected))
