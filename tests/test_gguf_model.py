"""benchmarks/gguf_model.py: a tiny quantized Llama, written by llama.cpp's own package."""

import gguf
import numpy as np
import torch

from rlhf_pipeline.models import base_model
from rlhf_pipeline.models.loading import load_policy, load_tokenizer
from rlhf_pipeline.runtime.job import LaunchedJob

WIDTH, INNER, LAYERS, HEADS = 32, 64, 2, 4
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
# GPT-2's alphabet of bytes: the printable ones, and characters from 256 on for the others.
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
ALPHABET = [chr(b) for b in BYTES] + [chr(256 + i) for i in range(256 - len(BYTES))]
TOKENS = ["<s>", "</s>", *ALPHABET, "ab", "cd", *(f"<unused{i}>" for i in range(60))]


def write_gguf(path):
    writer = gguf.GGUFWriter(str(path), "llama")
    for field, value in {
        "block_count": LAYERS, "context_length": 128, "embedding_length": WIDTH,
        "feed_forward_length": INNER, "head_count": HEADS, "head_count_kv": HEADS,
        "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0, "vocab_size": len(TOKENS),
        "tokenizer_model": "gpt2", "token_list": TOKENS, "token_merges": ["a b", "c d"],
        "token_types": [3, 3, *[1] * (len(TOKENS) - 2)], "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": 1, "chat_template": TEMPLATE,
    }.items():  # fmt: skip
        getattr(writer, f"add_{field}")(value)
    numbers = np.random.default_rng(0)
    for name, shape in shapes().items():
        weights = numbers.normal(0, 0.3, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, weights)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def shapes():
    layer = {
        "attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH, WIDTH), "attn_v": (WIDTH, WIDTH),
        "attn_output": (WIDTH, WIDTH), "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH),
        "ffn_down": (WIDTH, INNER), "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,),
    }  # fmt: skip
    blocks = {
        f"blk.{index}.{name}.weight": shape
        for index in range(LAYERS)
        for name, shape in layer.items()
    }
    return {
        "token_embd.weight": (len(TOKENS), WIDTH),
        **blocks,
        "output_norm.weight": (WIDTH,),
    }


def test_the_base_model_has_the_files_weights_tokenizer_and_template(benchmark, tmp_path):
    file = write_gguf(tmp_path / "tiny.Q8_0.gguf")
    benchmark("gguf_model").convert(file, tmp_path / "plain")
    given = {"base_model": {"path": str(tmp_path / "plain")}}
    job = LaunchedJob("base_model", "f", 1, given, {}, {}, tmp_path / "work", 60.0)
    base_model.main(job)
    folder = job.export

    model, tokenizer = load_policy(folder, "fp32"), load_tokenizer(folder)
    stored = {t.name: t for t in gguf.GGUFReader(file).tensors}
    down = stored["blk.1.ffn_down.weight"]
    expected = gguf.quants.dequantize(down.data, down.tensor_type)
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, torch.from_numpy(expected))

    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab c"}], tokenize=False) == (
        "<s>user: ab c</s>"
    )
    assert tokenizer.decode(tokenizer("ab c")["input_ids"]) == "ab c"
    # The file pads with its EOS; padding gets a token of its own, in an embedding of 64 * n rows.
    assert tokenizer.pad_token == "<|pad|>" and tokenizer.eos_token == "</s>"
    assert model.get_input_embeddings().num_embeddings == 384
    assert not list(folder.glob("*.gguf"))
