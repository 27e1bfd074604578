"""The task of the parity benchmark: models, data, score, and the evaluation of a policy.

A response scores the share of its tokens that are among the first `GOOD` of 62 letters; EOS counts
as a token. A start policy answers with 6 to 15 random letters. PPO maximizes a reward model that
was trained to predict the share; GRPO and RLOO maximize the share itself; DPO prefers the answer
with the larger share, and KTO has both of them, and single answers whose label says whether their
share is above that of random letters. A teacher answers with a share of 0.8. A seed decides models
and data.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset
from parity_recipe import RESPONSE_TOKENS
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    OPTConfig,
    PreTrainedTokenizerFast,
)

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.model_files import save_model
from rlhf_pipeline.models.scalar_head import load_scores, store_score_mean

LETTERS, GOOD = 62, 16
PAD, EOS = LETTERS, LETTERS + 1
PROMPTS, HELD_OUT, DRAWS = 800, 256, 4
PAIRS, LABELLED = 1600, 800
WARM_UP = {"policy": 200, "reward_model": 400}
"""Steps on 32 random answers that make the models a seed starts from."""

Ids = list[int]


def share(response: Ids) -> float:
    """The share of good letters among the tokens of a response, EOS included."""
    return sum(token < GOOD for token in response) / len(response)


def reward(prompts: Any, responses: Any, scored: Any) -> list[float]:
    """`share`, as this project calls it."""
    sequences = scored.sequences
    rows = zip(sequences.response_ids, sequences.action_mask, strict=True)
    return [share(ids[mask].tolist()) for ids, mask in rows]


def prepare(seed: int, folder: Path) -> dict[str, Path]:
    """The inputs of a seed, by the names of the stages; they are made once."""
    rows = {"prompts": prompt_row, "comparisons": pair_row, "labelled": labelled_row}
    found = {name: folder / name for name in ("sft_model", "reward_model", "teacher", *rows)}
    if not (folder / "done").exists():
        draw = random.Random(seed)
        torch.manual_seed(seed)
        make_policy(draw, found["sft_model"])
        make_reward_model(draw, found["sft_model"], found["reward_model"])
        contract = TokenContract.read(found["sft_model"])
        for name, size in zip(rows, (PROMPTS, PAIRS, LABELLED), strict=True):
            for part, count in {"train": size, "validation": HELD_OUT}.items():
                write([rows[name](draw) for _ in range(count)], found[name] / f"{part}.arrow")
            contract.write(found[name])
        make_policy(draw, found["teacher"], good=0.8)
        (folder / "done").touch()
    return found


def prompt_row(draw: random.Random) -> dict[str, Any]:
    """A prompt of 4 to 8 letters, with the columns that rewards by functions ask for."""
    messages = [{"role": "user", "content": ""}]
    own = {"source": "parity", "messages": messages, "reference": None}
    return {"prompt_ids": letters(draw, draw.randint(4, 8))} | own


def pair_row(draw: random.Random) -> dict[str, Any]:
    """Two answers of the start policy's kind, which differ in their share."""
    while True:
        worse, better = sorted((answer(draw), answer(draw)), key=share)
        if share(worse) < share(better):
            prompt = letters(draw, draw.randint(4, 8))
            return {"prompt_ids": prompt, "chosen_ids": better, "rejected_ids": worse}


def labelled_row(draw: random.Random) -> dict[str, Any]:
    """A single answer of the start policy's kind."""
    own = answer(draw)
    prompt = letters(draw, draw.randint(4, 8))
    return {"prompt_ids": prompt, "response_ids": own, "label": share(own) > GOOD / LETTERS}


def answer(draw: random.Random, good: float = GOOD / LETTERS) -> Ids:
    """6 to 15 letters, of which the share `good` is among the first ones, and EOS."""
    count = draw.randint(6, RESPONSE_TOKENS - 1)
    return [
        draw.randrange(GOOD) if draw.random() < good else draw.randrange(GOOD, LETTERS)
        for _ in range(count)
    ] + [EOS]


def letters(draw: random.Random, count: int) -> Ids:
    return [draw.randrange(LETTERS) for _ in range(count)]


def write(rows: list[dict[str, Any]], file: Path) -> None:
    """An Arrow stream."""
    table = pa.Table.from_pylist(rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)


def make_policy(draw: random.Random, folder: Path, good: float = GOOD / LETTERS) -> None:
    """A random model of two layers, trained on random answers with this share of good letters."""
    config = OPTConfig(
        vocab_size=LETTERS + 2, hidden_size=64, word_embed_proj_dim=64, ffn_dim=256,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64, dropout=0.0,
        attention_dropout=0.0, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)

    def loss() -> Tensor:
        rows = [(letters(draw, draw.randint(4, 8)), answer(draw, good)) for _ in range(32)]
        logprobs, mask = token_logprobs(model, *padded(rows))
        return -logprobs[mask].mean()

    fit(model, loss, WARM_UP["policy"])
    save_model(model, tokenizer(), folder)


def make_reward_model(draw: random.Random, policy: Path, folder: Path) -> None:
    """The start policy with a scalar head, trained to predict the share at the last token."""
    model = load_scores(policy, "fp32", new_head=True)

    def loss() -> Tensor:
        prompts = (letters(draw, draw.randint(4, 8)) for _ in range(32))
        rows = [(prompt, answer(draw, draw.random())) for prompt in prompts]
        for _, response in rows:
            if draw.random() < 0.2:  # a response that was cut
                response.pop()
        ids, real, _ = padded(rows, left=True)
        scores = model(
            input_ids=ids, attention_mask=real.long(), position_ids=places(real), scores_to_keep=1
        )
        expected = torch.tensor([share(response) for _, response in rows])
        return (scores[:, 0] - expected).square().mean()

    fit(model, loss, WARM_UP["reward_model"])
    save_model(model, tokenizer(), folder)
    store_score_mean(folder, 0.0)


def fit(model: torch.nn.Module, loss: Any, steps: int) -> None:
    """AdamW with a learning rate of 3e-3 that falls linearly to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        schedule.step()


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each letter; nobody reads texts."""
    words = {f"w{number}": number for number in range(LETTERS)} | {"<pad>": PAD, "<eos>": EOS}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))  # noqa: S106
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)


def padded(rows: list[tuple[Ids, Ids]], *, left: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts with responses: ids, real tokens and tokens of the response, (N, T) each."""
    width = max(len(prompt) + len(response) for prompt, response in rows)
    found = []
    for prompt, response in rows:
        gap = width - len(prompt) - len(response)
        row = [(token, 1, 0) for token in prompt] + [(token, 1, 1) for token in response]
        empty = [(PAD, 0, 0)] * gap
        found.append(empty + row if left else row + empty)
    ids, real, chosen = torch.tensor(found).unbind(2)
    return ids, real.bool(), chosen.bool()


def places(real: Tensor) -> Tensor:
    """The position of each token among the real ones."""
    return (real.long().cumsum(1) - 1).clamp(min=0)


def token_logprobs(model: Any, ids: Tensor, real: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """log p of each token but the first, and which of them belong to the response, (N, T - 1)."""
    found = distributions(model, ids, real).gather(2, ids[:, 1:, None]).squeeze(2)
    return found, chosen[:, 1:]


def distributions(model: Any, ids: Tensor, real: Tensor) -> Tensor:
    """log p over the vocabulary after each token but the last, (N, T - 1, V)."""
    logits = model(ids, attention_mask=real.long(), position_ids=places(real)).logits
    return logits[:, :-1].float().log_softmax(-1)


@torch.no_grad()
def evaluate(policy: Path, inputs: dict[str, Path], seed: int) -> dict[str, float]:
    """Measures of a policy on held-out prompts and pairs, by the same code for both sides.

    score: mean share of own samples. proxy: their mean score by the reward model. kl: exact KL to
    the start policy over the vocabulary, summed over the tokens of own samples, in nats. tokens:
    their mean number. teacher_kl: the same KL to the teacher. accuracy, margin, loss: of DPO on the
    held-out pairs, with beta 0.1.
    """
    model, start, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (policy, inputs["sft_model"], inputs["teacher"])
    )
    prompts = Dataset.from_file(str(inputs["prompts"] / "validation.arrow"))["prompt_ids"][:]
    torch.manual_seed(seed)
    rows = sampled(model, [ids for ids in prompts for _ in range(DRAWS)])
    ids, real, chosen = padded(rows)
    found = {"score": sum(share(response) for _, response in rows) / len(rows)}
    ours = distributions(model, ids, real)
    for name, other in {"kl": start, "teacher_kl": teacher}.items():
        theirs = distributions(other, ids, real)
        kl = ((ours.exp() * (ours - theirs)).sum(-1) * chosen[:, 1:]).sum(1).mean()
        found[name] = float(kl)
    found["tokens"] = float(chosen.sum(1).float().mean())
    found["proxy"] = float(proxy_scores(inputs["reward_model"], rows).mean())
    pairs = Dataset.from_file(str(inputs["comparisons"] / "validation.arrow"))
    ratios = {}
    for name in ("chosen_ids", "rejected_ids"):
        answers = padded(list(zip(pairs["prompt_ids"][:], pairs[name][:], strict=True)))
        own, mask = token_logprobs(model, *answers)
        ratios[name] = ((own - token_logprobs(start, *answers)[0]) * mask).sum(1)
    margin = 0.1 * (ratios["chosen_ids"] - ratios["rejected_ids"])
    return found | {
        "accuracy": float((margin > 0).float().mean() + 0.5 * (margin == 0).float().mean()),
        "margin": float(margin.mean()), "loss": float(-logsigmoid(margin).mean()),
    }  # fmt: skip


def proxy_scores(reward_model: Path, rows: list[tuple[Ids, Ids]]) -> Tensor:
    """The reward model's scores at the last token, (N,)."""
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, num_labels=1).eval()
    ids, real, _ = padded(rows, left=True)
    hidden = model.model(ids, attention_mask=real.long(), position_ids=places(real))[0]
    return model.score(hidden[:, -1]).squeeze(1)


def sampled(model: Any, prompts: list[Ids]) -> list[tuple[Ids, Ids]]:
    """A response to each prompt at temperature 1."""
    ids, real, _ = padded([(prompt, []) for prompt in prompts], left=True)
    whole = model.generate(
        input_ids=ids, attention_mask=real.long(), do_sample=True, top_k=0, top_p=1.0,
        temperature=1.0, max_new_tokens=RESPONSE_TOKENS, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    rows = []
    for prompt, response in zip(prompts, whole[:, ids.shape[1] :].tolist(), strict=True):
        end = response.index(EOS) + 1 if EOS in response else len(response)
        rows.append((prompt, response[:end]))
    return rows
