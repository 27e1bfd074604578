"""Tiny models with the control tokens and the chat templates of well-known chat models."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.models import base_model
from rlhf_pipeline.runtime.job import LaunchedJob

LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
"""Llama 3.1's template without its part for tools."""

QWEN_2 = """
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. ' }}
    {{- 'You are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role != "system" or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Qwen2.5's template without its part for tools."""

SMOLLM2 = "SMOLLM2_PATH"
"""Environment variable: a folder with the tokenizer of SmolLM2-Instruct."""


@dataclass(frozen=True)
class ChatModel:
    """A chat model as its authors published it."""

    model_type: str
    ends: tuple[str, ...]
    """The tokens of `eos_token_id` in generation_config.json."""
    turn_end: str
    """The token after an assistant's turn in the chat template."""
    controls: tuple[str, ...] = ()
    template: str = ""
    special: Mapping[str, str] | None = None
    """The tokenizer's named tokens. None: the tokenizer is read from SMOLLM2_PATH."""
    text_begins_with: str | None = None
    """The token that the tokenizer puts before text."""


LLAMA_3_1 = ChatModel(
    "llama",
    ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    turn_end="<|eot_id|>",
    controls=(
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
        "<|eom_id|>", "<|eot_id|>",
    ),
    template=LLAMA_3,
    special={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    text_begins_with="<|begin_of_text|>",
)  # fmt: skip
CHAT_MODELS = {
    "Llama 3.1": LLAMA_3_1,
    # Its first release named the end of a document as EOS, although turns end otherwise.
    "Llama 3": replace(
        LLAMA_3_1,
        ends=("<|end_of_text|>", "<|eot_id|>"),
        controls=tuple(each for each in LLAMA_3_1.controls if each != "<|eom_id|>"),
        special={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    ),
    # It pads with one of its EOS tokens.
    "Qwen2.5": ChatModel(
        "qwen2",
        ends=("<|im_end|>", "<|endoftext|>"),
        turn_end="<|im_end|>",
        controls=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        template=QWEN_2,
        special={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    ),
    "SmolLM2": ChatModel("llama", ends=("<|im_end|>",), turn_end="<|im_end|>"),
}  # fmt: skip

TEXTS = (
    "What colour is the sky on a clear day? On a clear day the sky is blue.",
    "Where do penguins live? They live on the coasts of the southern half of the world.",
)


def published_tokenizer(model: ChatModel) -> PreTrainedTokenizerBase:
    """The tokenizer of a chat model, with few words."""
    if model.special is None:
        return AutoTokenizer.from_pretrained(os.environ[SMOLLM2])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(list(model.controls))
    if (first := model.text_begins_with) is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=model.template, **model.special
    )


def publish(name: str, folder: Path, *, following: Mapping[str, str] | None = None) -> Path:
    """Save a random model as on the hub. `following` fixes the most likely token after others."""
    model = CHAT_MODELS[name]
    tokenizer = published_tokenizer(model)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model.model_type, vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    policy = AutoModelForCausalLM.from_config(config)
    if following is not None:
        _follow(policy, tokenizer, following)
    policy.generation_config = GenerationConfig(
        eos_token_id=tokenizer.convert_tokens_to_ids(list(model.ends)),
        pad_token_id=tokenizer.pad_token_id,
    )
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _follow(
    policy: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, following: Mapping[str, str]
) -> None:
    """Let the last token alone decide the next one."""
    with torch.no_grad():
        for layer in policy.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = torch.nn.functional.normalize(torch.randn(len(tokenizer), 64), dim=1)
        policy.model.embed_tokens.weight.copy_(embeddings)
        policy.lm_head.weight.zero_()
        for last, next_one in following.items():
            last_id, next_id = tokenizer.convert_tokens_to_ids([last, next_one])
            policy.lm_head.weight[next_id] += 20 * embeddings[last_id]


def fetch(folder: Path, directory: Path, **config: object) -> Path:
    """Run stage base_model on a published model in this process; return its artifact."""
    block = json.loads(BaseModelConfig(path=str(folder), **config).model_dump_json())
    job = LaunchedJob("base_model", "f", 1, {"base_model": block}, {}, {}, directory, 60.0)
    base_model.main(job)
    return job.export
