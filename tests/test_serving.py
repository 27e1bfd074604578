"""An exported policy as an MLflow model, in process and over HTTP (`mlflow models serve`)."""

import json
import os
import shutil
import sys
import urllib.request
from pathlib import Path

import pandas
import psutil
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.loading import MLMODEL
from rlhf_pipeline.runtime.manifest import Manifest, file_entries

SOURCE = Path(__file__).parents[1] / "src"
WORDS = ["<pad>", "<eos>", "<unk>", "user", "assistant", *"abcdefgh"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A random tiny Llama of 16 vocabulary rows with 13 tokens; rows 13 to 15 are padding."""
    directory = tmp_path_factory.mktemp("policy")
    words = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        padding_side="right",
    )  # fmt: skip
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ' ' + m.content + ' <eos> ' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = LlamaConfig(
        vocab_size=16, num_attention_heads=2, initializer_range=1.0, **sizes, **ids
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[13:] *= 20  # padding rows become the most likely
    model.generation_config.top_k = 2  # must not affect an answer
    model.generation_config.do_sample = True
    model.save_pretrained(directory)
    (directory / "MLmodel").write_text(MLMODEL)
    return directory


@pytest.fixture(scope="module")
def served(policy):
    import mlflow.pyfunc

    return mlflow.pyfunc.load_model(str(policy))


def prompts(*texts):
    return pandas.DataFrame({"prompt": texts})


def greedy_by_hand(policy, prompt_ids, count):
    """Take the most likely of the 13 real tokens at each position, without padding."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    ids = list(prompt_ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1, :13].argmax()))
            if ids[-1] == 1:
                break
    return " ".join(WORDS[number] for number in ids[len(prompt_ids) :] if number > 2)


def test_greedy_answers_do_not_depend_on_the_padding(policy, served):
    # The chat template: user=3, a=5, b=6, c=7, <eos>=1, assistant=4.
    answers = served.predict(prompts("a", "a b c a b c"), {"max_new_tokens": 6})
    assert answers == [
        greedy_by_hand(policy, [3, 5, 1, 4], 6),
        greedy_by_hand(policy, [3, 5, 6, 7, 5, 6, 7, 1, 4], 6),
    ]
    assert all(answers)


def test_sampling_follows_the_seed_and_keeps_the_callers_random_state(served):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    answers = [
        served.predict(prompts("a b"), {"max_new_tokens": 12, "temperature": 9.0, "seed": seed})[0]
        for seed in (1, 1, 2, 3, 4, 5, 6, 7)
    ]
    assert answers[0] == answers[1]
    # The model's own top_k would allow two first words.
    assert len({answer.partition(" ")[0] for answer in answers}) > 2
    assert torch.rand(1) == expected


def test_a_policy_that_was_changed_is_not_served(policy, tmp_path):
    """One bit of one weight."""
    import mlflow.pyfunc

    changed = shutil.copytree(policy, tmp_path / "policy")
    Manifest("ppo", "f", 1, {}, {}, {}, {}, file_entries(changed)).write(changed)
    assert mlflow.pyfunc.load_model(str(changed)).predict(prompts("a"), {"max_new_tokens": 1})
    weights = changed / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0x40
    weights.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"model\.safetensors was changed after stage ppo"):
        mlflow.pyfunc.load_model(str(changed))


@pytest.mark.long
def test_mlflow_serves_the_registered_version(policy, start_server, tmp_path):
    from mlflow import MlflowClient

    store = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(store)
    client.create_registered_model("mine")
    client.create_model_version("mine", source=str(policy))
    client.set_registered_model_alias("mine", "champion", "1")
    served = ["models", "serve", "-m", "models:/mine@champion", "--env-manager", "local"]
    # mlflow starts the server by a script in the environment's bin folder.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"PYTHONPATH": str(SOURCE), "DO_NOT_TRACK": "true", "PATH": path}
    command = [sys.executable, "-m", "mlflow", *served]
    address = start_server(command, "/ping", variables | {"MLFLOW_TRACKING_URI": store})
    body = {"dataframe_records": [{"prompt": "a b"}], "params": {"max_new_tokens": 2}}
    request = urllib.request.Request(
        f"{address}/invocations", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = json.load(response)
    expected = greedy_by_hand(policy, [3, 5, 6, 1, 4], 2)
    assert answer == {"predictions": [expected]}
    assert expected != greedy_by_hand(policy, [3, 5, 6, 1, 4], 3)  # it was cut
    port = int(address.rpartition(":")[2])
    listening = [socket for socket in psutil.net_connections("inet") if socket.status == "LISTEN"]
    assert {socket.laddr.ip for socket in listening if socket.laddr.port == port} == {"127.0.0.1"}
