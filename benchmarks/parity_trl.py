"""A trainer of TRL on the parity task; started by `parity.py`.

Writes final/ and steps.json, the numbers of each step, into the folder of the job.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from parity_recipe import BATCH, LORA_ALPHA, LORA_RANK, RECIPES, STEPS, base, trl
from parity_task import padded, share, token_logprobs
from peft import LoraConfig
from torch.utils.data import DataLoader, SequentialSampler
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
    set_seed,
)

from rlhf_pipeline.distributed.batches import step_rows

given = json.loads(sys.argv[1])
METHOD, SEED, FOLDER = given["method"], given["seed"], Path(given["folder"])
RECIPE = RECIPES[METHOD]
POLICY = given["inputs"]["sft_model"]
steps: list[dict[str, float]] = []


class Recording(TrainerCallback):
    """Keeps the logged numbers of each step."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        if all(name in logs for name in self.names.values()):
            steps.append({own: float(logs[name]) for own, name in self.names.items()})


class OfTokens:
    """A trainer whose rows are tokens already, in their order."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        return dataset

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def ordered(table: Dataset, size: int) -> Dataset:
    """The rows in the order in which this project draws them, `size` of them a step."""
    rows = [step_rows(len(table), size, step, SEED) for step in range(STEPS)]
    return table.select(np.concatenate(rows))


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(POLICY, padding_side="left")


def of_ppo() -> Any:
    """The trainer and its policy."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    def scalar() -> Any:
        folder = given["inputs"]["reward_model"]
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)

    policy, start = (AutoModelForCausalLM.from_pretrained(POLICY) for _ in range(2))
    prompts = Dataset.from_file(f"{given['inputs']['prompts']}/train.arrow")
    prompts = prompts.rename_column("prompt_ids", "input_ids").select_columns(["input_ids"])
    prompts = ordered(prompts, BATCH)
    trainer = PPOTrainer(
        args=PPOConfig(**trl(METHOD, str(FOLDER), SEED)), processing_class=tokenizer(),
        model=policy, ref_model=start, reward_model=scalar(), value_model=scalar(),
        train_dataset=prompts, eval_dataset=prompts.select(range(BATCH)),
        callbacks=[Recording({"score": "objective/scores", "kl": "objective/kl"})],
    )  # fmt: skip
    trainer.dataloader = DataLoader(prompts, batch_size=BATCH, collate_fn=trainer.data_collator)
    return trainer, policy


def of_groups() -> Any:
    """The same for GRPO and RLOO, whose own log has no KL of whole responses."""
    import trl as library

    base = {"grpo": library.GRPOTrainer, "rloo": library.RLOOTrainer}[METHOD]
    config = {"grpo": library.GRPOConfig, "rloo": library.RLOOConfig}[METHOD]
    table = Dataset.from_file(f"{given['inputs']['prompts']}/train.arrow")
    all_ids = table["prompt_ids"][:]
    shares: list[float] = []

    class Trainer(base):
        """Its prompts are tokens already; a prompt of the data set is the number of its row."""

        def _tokenize_prompts(self, prompts: list[str]) -> Any:
            return [all_ids[int(prompt)] for prompt in prompts], None, {}

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            found = super()._generate_and_score_completions(inputs)
            ids = torch.cat([found["prompt_ids"], found["completion_ids"]], dim=1)
            mask = torch.cat([found["prompt_mask"], found["completion_mask"]], dim=1)
            width, chosen = found["completion_ids"].shape[1], found["completion_mask"]
            with torch.no_grad():
                own, start = (
                    self._get_per_token_logps_and_entropies(model, ids, mask, width)[0]
                    for model in (self.model, self.ref_model)
                )
            kl = float(((own - start) * chosen).sum(1).mean())
            tokens = float(chosen.sum(1).float().mean())
            steps.append({"score": float(np.mean(shares[-BATCH:])), "kl": kl, "tokens": tokens})
            return found

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        shares.extend(map(share, completion_ids))
        return shares[-len(completion_ids) :]

    numbers = Dataset.from_dict({"row": list(range(len(table)))})
    rows = ordered(numbers, BATCH // RECIPES[METHOD].responses_per_prompt)["row"][:]
    trainer = Trainer(
        model=POLICY, reward_funcs=reward, args=config(**trl(METHOD, str(FOLDER), SEED)),
        train_dataset=Dataset.from_dict({"prompt": [str(row) for row in rows]}),
        processing_class=tokenizer(),
    )  # fmt: skip
    return trainer, trainer.model


def of_dpo() -> Any:
    """The same for DPO."""
    from trl import DPOConfig, DPOTrainer

    class Trainer(OfTokens, DPOTrainer):
        pass

    pairs = Dataset.from_file(f"{given['inputs']['comparisons']}/train.arrow")
    names = {"accuracy": "rewards/accuracies", "margin": "rewards/margins", "loss": "loss"}
    adapters = {}
    if RECIPE.lora:
        lora = LoraConfig(
            r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        adapters = {"peft_config": lora}
    trainer = Trainer(
        **adapters, model=POLICY, args=DPOConfig(**trl(METHOD, str(FOLDER), SEED)),
        train_dataset=ordered(pairs, BATCH), processing_class=tokenizer(),
        callbacks=[Recording(names)],
    )  # fmt: skip
    return trainer, trainer.model


def of_kto() -> Any:
    """The same for KTO. Its KL is that of prompts with the answer of the row before."""
    from trl import KTOConfig, KTOTrainer

    class Trainer(OfTokens, KTOTrainer):
        pass

    def others(rows: dict[str, Any]) -> dict[str, Any]:
        answers = rows["completion_ids"]
        return {"KL_completion_ids": [answers[-1], *answers[:-1]]}

    pairs, labelled = (
        Dataset.from_file(f"{given['inputs'][name]}/train.arrow")
        for name in ("comparisons", "labelled")
    )
    prompts = pairs.select_columns("prompt_ids")
    sides = [
        prompts.add_column("completion_ids", pairs[name][:]).add_column(
            "label", [label] * len(pairs)
        )
        for name, label in (("chosen_ids", True), ("rejected_ids", False))
    ]
    rows = ordered(
        concatenate_datasets([*sides, labelled.rename_column("response_ids", "completion_ids")]),
        BATCH,
    )
    trainer = Trainer(
        model=POLICY, args=KTOConfig(**trl(METHOD, str(FOLDER), SEED)),
        train_dataset=rows.map(others, batched=True, batch_size=BATCH),
        processing_class=tokenizer(),
        callbacks=[Recording({"loss": "loss", "good": "rewards/chosen"})],
    )  # fmt: skip
    return trainer, trainer.model


def of_distill() -> Any:
    """The same for distillation."""
    from trl import DistillationConfig, DistillationTrainer

    table = Dataset.from_file(f"{given['inputs']['prompts']}/train.arrow")
    all_ids = table["prompt_ids"][:]

    class Trainer(DistillationTrainer):
        """Its prompts are tokens already; a prompt of the data set is the number of its row."""

        def _tokenize_prompts(self, prompts: list[str]) -> Any:
            return [all_ids[int(prompt)] for prompt in prompts], None, {}

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            found = super()._generate_and_score_completions(inputs)
            kinds = ("prompt", "completion")
            parts = [
                [
                    ids[mask.bool()].tolist()
                    for ids, mask in zip(found[f"{kind}_ids"], found[f"{kind}_mask"], strict=True)
                ]
                for kind in kinds
            ]
            rows = padded(list(zip(*parts, strict=True)))
            with torch.no_grad():
                own, mask = token_logprobs(self.model, *rows)
                kl = ((own - token_logprobs(self.teacher_model, *rows)[0]) * mask).sum(1).mean()
            steps.append({"kl": float(kl), "tokens": float(mask.sum(1).float().mean())})
            return found

    numbers = Dataset.from_dict({"row": list(range(len(table)))})
    rows = [str(row) for row in ordered(numbers, BATCH)["row"][:]]
    trainer = Trainer(
        model=POLICY, teacher_model=given["inputs"]["teacher"],
        args=DistillationConfig(**trl(METHOD, str(FOLDER), SEED)),
        train_dataset=Dataset.from_dict({"prompt": rows}), processing_class=tokenizer(),
    )  # fmt: skip
    return trainer, trainer.model


if __name__ == "__main__":
    set_seed(SEED)  # TRL's PPO draws its minibatches from numpy, whose seed it does not set
    makers = {"ppo": of_ppo, "dpo": of_dpo, "kto": of_kto, "distill": of_distill}
    trainer, policy = makers.get(base(METHOD), of_groups)()
    gc.freeze()  # TRL's PPO collects garbage twice a step, and would look at every module
    trainer.train()
    if os.environ.get("RANK", "0") != "0":
        raise SystemExit
    policy = policy.merge_and_unload() if RECIPE.lora else policy
    policy.save_pretrained(FOLDER / "final")
    (FOLDER / "steps.json").write_text(json.dumps(steps))
