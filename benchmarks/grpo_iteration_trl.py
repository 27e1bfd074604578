"""GRPO of TRL, one iteration for each line `go`; started by `ppo_iteration.py`."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_turns import TakingTurns

from rlhf_pipeline.distributed.batches import step_rows

STEPS = 1000


class Trainer(GRPOTrainer):
    """Its prompts are tokens already; a prompt of the data set is the number of its row."""

    def _tokenize_prompts(self, prompts):
        return [IDS[int(prompt)] for prompt in prompts], None, {}


def reward(completions, **_):
    """1 for a letter of the first half of the alphabet."""
    return [float(re.search("[a-m]", completion) is not None) for completion in completions]


given = json.loads(sys.argv[1])
policy, batch, group = given["inputs"]["sft_model"], given["batch"], given["group"]
IDS = Dataset.from_file(f"{given['inputs']['prompts']}/train.arrow")["prompt_ids"][:]
# The prompts of this project's GRPO, in its order.
steps = [step_rows(len(IDS), batch // group, step, 1) for step in range(STEPS)]
arguments = GRPOConfig(
    output_dir=given["folder"],
    model_init_kwargs={"dtype": {"fp32": "float32", "bf16": "bfloat16"}[given["precision"]]},
    per_device_train_batch_size=batch,
    gradient_accumulation_steps=1,
    num_generations=group,
    max_completion_length=given["response_tokens"],
    temperature=1.0,
    beta=0.04,
    learning_rate=3e-6,
    max_steps=STEPS,
    shuffle_dataset=False,
    gradient_checkpointing=False,
    bf16=False,  # the weights have the precision already
    save_strategy="no",
    report_to="none",
    logging_steps=1,
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(
    model=policy,
    reward_funcs=reward,
    args=arguments,
    train_dataset=Dataset.from_dict({"prompt": [str(row) for row in np.concatenate(steps)]}),
    processing_class=AutoTokenizer.from_pretrained(policy, padding_side="left"),
    callbacks=[TakingTurns()],
)
trainer.train()
