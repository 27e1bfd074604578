"""PPO of TRL, one iteration for each line `go`; started by `ppo_iteration.py`."""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl_turns import TakingTurns

from rlhf_pipeline.distributed.batches import step_rows

STEPS = 1000


given = json.loads(sys.argv[1])
dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[given["precision"]]
policy, reward_model = given["inputs"]["sft_model"], given["inputs"]["reward_model"]
tokenizer = AutoTokenizer.from_pretrained(policy, padding_side="left")
language = lambda: AutoModelForCausalLM.from_pretrained(policy, dtype=dtype)  # noqa: E731
scalar = lambda: AutoModelForSequenceClassification.from_pretrained(  # noqa: E731
    reward_model, num_labels=1, dtype=dtype
)
prompts = Dataset.from_file(f"{given['inputs']['prompts']}/train.arrow")
prompts = prompts.rename_column("prompt_ids", "input_ids").select_columns(["input_ids"])
batch, seed = given["batch"], 1
# The prompts of this project's PPO, in its order.
steps = [step_rows(len(prompts), batch, step, seed) for step in range(STEPS)]
prompts = prompts.select(np.concatenate(steps))
arguments = PPOConfig(
    output_dir=given["folder"],
    per_device_train_batch_size=batch,
    gradient_accumulation_steps=1,
    num_mini_batches=1,
    num_ppo_epochs=1,
    local_rollout_forward_batch_size=batch,
    total_episodes=STEPS * batch,
    response_length=given["response_tokens"],
    stop_token="eos",  # noqa: S106
    temperature=1.0,
    num_sample_generations=0,
    gradient_checkpointing=False,
    bf16=False,  # the weights have the precision already
    learning_rate=3e-6,
    save_strategy="no",
    report_to="none",
    logging_steps=1,
    use_cpu=True,
    disable_tqdm=True,
)
trainer = PPOTrainer(
    args=arguments,
    processing_class=tokenizer,
    model=language(),
    ref_model=language(),
    reward_model=scalar(),
    value_model=scalar(),
    train_dataset=prompts,
    eval_dataset=prompts.select(range(batch)),
    callbacks=[TakingTurns()],
)
trainer.dataloader = DataLoader(prompts, batch_size=batch, collate_fn=trainer.data_collator)
trainer.train()
