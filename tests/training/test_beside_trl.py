"""Our losses and gradients are those of TRL's own trainers, on random ragged batches.

Both sides get the same answers, rewards and log-probabilities, and each setting in its own words.
TRL computes advantages, sampler weights and loss in its trainer; we do in `make_experience` and
`actor_loss`. Gradients are those of the log-probabilities.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_pipeline.config.doors import DPO_LOSS, call_with
from rlhf_pipeline.config.policies import GRPOConfig
from rlhf_pipeline.config.preferences import DPOConfig, KTOConfig
from rlhf_pipeline.generation.records import Scored, TrainingPass
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.rl.preference_losses import kto_loss
from rlhf_pipeline.training.experience import make_experience
from rlhf_pipeline.training.ppo_update import actor_loss, terms_of

pytestmark = pytest.mark.skipif(
    find_spec("trl") is None,
    reason="needs TRL: pip install --no-deps --constraint constraints.txt trl",
)
PROMPTS, ANSWERS, LONGEST = 4, 4, 7
ROWS = PROMPTS * ANSWERS
REWARD_WEIGHTS = (1.0, 0.5)
SEEDS = (1, 2, 3)
BOUND = 1e-6
"""Largest difference of a gradient, in parts of the largest one, and of a loss."""

GSPO = {"importance": "sequence", "clip_range": 3e-2, "clip_range_high": 4e-2}
TRL_GSPO = {"importance_sampling_level": "sequence", "epsilon": 3e-2, "epsilon_high": 4e-2}


def vllm(mode: str, maximum: float) -> dict:
    """The arguments of TRL for weights of a sampler; ours stand beside them."""
    return {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": maximum}


def weights(level: str, beyond: str, maximum: float) -> dict:
    return {"sampler_correction": {"level": level, "beyond": beyond, "maximum": maximum}}


GRPO_SETTINGS = {
    "dapo": ({}, {}),
    "grpo": ({"denominator": "sequences"}, {"loss_type": "grpo"}),
    "dr_grpo": (
        {"denominator": "constant", "scale_rewards": "none"},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
    "cispo": (
        {"policy_loss": "cispo", "clip_range_high": 0.4},
        {"loss_type": "cispo", "epsilon_high": 1.4},
    ),
    "clip-higher": ({"clip_range_high": 0.28}, {"epsilon_high": 0.28}),
    "no deviation": ({"scale_rewards": "none"}, {"scale_rewards": "none"}),
    "deviation of the batch": ({"scale_rewards": "batch"}, {"scale_rewards": "batch"}),
    "gdpo": ({"advantage": "gdpo"}, {"multi_objective_aggregation": "normalize_then_sum"}),
    "cut answers masked": ({"truncated": "mask"}, {"mask_truncated_completions": True}),
    "gspo": (GSPO | {"denominator": "sequences"}, TRL_GSPO | {"loss_type": "grpo"}),
    "gspo, tokens": (GSPO, TRL_GSPO),
    "gspo, constant": (GSPO | {"denominator": "constant"}, TRL_GSPO | {"loss_type": "dr_grpo"}),
    "cispo of sequences": (
        GSPO | {"policy_loss": "cispo", "clip_range_high": 0.1},
        TRL_GSPO | {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "sampler, tokens truncated": (weights("token", "truncate", 1.3), vllm("token_truncate", 1.3)),
    "sampler, tokens masked": (weights("token", "mask", 1.3), vllm("token_mask", 1.3)),
    "sampler, sequences truncated": (
        weights("sequence", "truncate", 1.2) | {"denominator": "sequences"},
        vllm("sequence_truncate", 1.2) | {"loss_type": "grpo"},
    ),
    "sampler, sequences masked": (weights("sequence", "mask", 1.5), vllm("sequence_mask", 1.5)),
    "sampler, cispo": (
        weights("token", "truncate", 2.0) | {"policy_loss": "cispo", "clip_range_high": 4.0},
        vllm("token_truncate", 2.0) | {"loss_type": "cispo", "epsilon_high": 5.0},
    ),
    "sampler, gspo": (
        weights("sequence", "truncate", 2.0) | GSPO | {"denominator": "sequences"},
        vllm("sequence_truncate", 2.0) | TRL_GSPO | {"loss_type": "grpo"},
    ),
    "kl": ({"kl": {"coef": 0.3, "place": "loss"}}, {"beta": 0.3}),
    "kl, sequences": (
        {"kl": {"coef": 0.3, "place": "loss"}, "denominator": "sequences"},
        {"beta": 0.3, "loss_type": "grpo"},
    ),
}
RLOO_SETTINGS = {
    "rloo": ({}, {"beta": 0.0}),
    "rloo, kl": ({"kl": {"coef": 0.3, "place": "reward"}}, {"beta": 0.3}),
}
DPO_SETTINGS = {
    "sigmoid": {},
    "hinge": {"beta": 0.5},
    "ipo": {},
    "robust": {"label_smoothing": 0.2},
    "sigmoid_norm": {"beta": 5.0},
}
"""The same words on both sides."""
SUPERVISED = {
    "batch_size": 8, "micro_batch_tokens": 64, "optimizer": {"learning_rate": 1e-6}
}  # fmt: skip
KTO_SETTINGS = {
    "kto": ({}, {}),
    "kto, weights": ({"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7},) * 2,
    "apo_zero_unpaired": ({"kl": "none"}, {"loss_type": "apo_zero_unpaired"}),
}


@dataclass(frozen=True)
class Batch:
    """Answers in the order of TRL, those to a prompt together; (B, R) but for rewards (B, S).

    A row of `order` is the one that we have at its place: a first answer to each prompt, then more.
    """

    ids: Tensor
    mask: Tensor
    ended: Tensor  # (B,)
    rewards: Tensor
    logprobs: Tensor
    old: Tensor
    reference: Tensor
    sampler: Tensor

    order = torch.arange(ROWS).view(PROMPTS, ANSWERS).T.flatten()

    @classmethod
    def random(cls, seed: int, eos: int) -> "Batch":
        """Policy, old policy, reference and sampler are near each other; some rows have a cut."""
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, LONGEST + 1, (ROWS,), generator=draw)
        lengths[0] = LONGEST  # the width of TRL's batch
        ended = (torch.rand(ROWS, generator=draw) < 0.7) | (lengths < LONGEST)
        ids = torch.randint(5, 50, (ROWS, LONGEST), generator=draw)
        ids[ended, lengths[ended] - 1] = eos

        def near(other: Tensor, distance: float) -> Tensor:
            return other - distance * torch.randn(ROWS, LONGEST, generator=draw)

        old = near(torch.full((ROWS, LONGEST), -2.0), 0.5)
        rewards = torch.rand(ROWS, 2, generator=draw).round(decimals=1)
        return cls(
            ids, torch.arange(LONGEST) < lengths[:, None], ended, rewards,
            near(old, 0.3), old, near(old, 0.3), near(old, 0.2),
        )  # fmt: skip

    @property
    def answers(self) -> list[list[int]]:
        return [ids[mask].tolist() for ids, mask in zip(self.ids, self.mask, strict=True)]


def answering(base: type) -> type:
    """A trainer of TRL that has the answers, rewards and log-probabilities of its `batch`."""

    class Trainer(base):
        is_grpo = base.__name__ == "GRPOTrainer"

        def _generate(self, prompts):
            answers = self.batch.answers
            sampler = zip(self.batch.sampler, self.batch.mask, strict=True)
            known = [row[mask].tolist() for row, mask in sampler]
            found = [[5]] * ROWS, answers, None, [""] * ROWS, known, {}, None, None
            return found if self.is_grpo else (found[0], answers, found[3])

        def _calculate_rewards(self, *_):
            return self.batch.rewards

        def _get_per_token_logps_and_entropies(self, model, *_, **__):
            known = self.batch.reference if model is self.ref_model else self.batch.old
            found = self.logprobs if torch.is_grad_enabled() else known
            return found, torch.zeros_like(found), None

    return Trainer


@pytest.fixture(scope="module")
def trainer_of(make_model, tmp_path_factory):
    """Makes a trainer of TRL, whose import takes seconds."""
    import trl
    from datasets import Dataset

    model, folder = str(make_model()), str(tmp_path_factory.mktemp("trl"))
    prompts = {"prompt": ["a"] * ROWS}
    columns = {
        "DPO": {"chosen": ["b"] * ROWS, "rejected": ["c"] * ROWS},
        "KTO": {"completion": ["b"] * ROWS, "label": [True, False] * (ROWS // 2)},
    }

    def make(method: str, **options):
        base, given = getattr(trl, f"{method}Trainer"), {}
        options |= {
            "output_dir": folder, "per_device_train_batch_size": ROWS, "use_cpu": True,
            "bf16": False, "report_to": "none", "gradient_checkpointing": False,
        }  # fmt: skip
        if method in ("GRPO", "RLOO"):
            base, given = answering(base), {"reward_funcs": [lambda **_: None] * 2}
            options |= {
                "num_generations": ANSWERS, "max_completion_length": LONGEST, "num_iterations": 2,
                "gradient_accumulation_steps": 1, "reward_weights": list(REWARD_WEIGHTS),
            }  # fmt: skip
        config = getattr(trl, f"{method}Config")(**options)
        table = Dataset.from_dict(prompts | columns.get(method, {}))
        trainer = base(model=model, args=config, train_dataset=table, **given)
        trainer.current_gradient_accumulation_steps = 1
        return trainer

    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)  # TRL would join a distributed run
        yield make


def of_trl(trainer, batch: Batch) -> tuple[Tensor, Tensor]:
    """Loss and gradient of TRL, by its own advantages and sampler weights."""
    trainer.batch, trainer.logprobs = batch, batch.logprobs.clone().requires_grad_()
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * ROWS)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach(), trainer.logprobs.grad


def of_ours(config: GRPOConfig, batch: Batch, on_threads) -> tuple[Tensor, Tensor]:
    """Ours, in the order of TRL."""
    logprobs, order = batch.logprobs.clone().requires_grad_(), batch.order
    mask, ids = batch.mask[order], batch.ids[order]
    prompts = torch.full((ROWS, 1), 5)
    sequences = Sequences(prompts, torch.ones_like(prompts).bool(), ids, mask, mask)
    parts = dict(zip("ab", batch.rewards[order].T, strict=True))
    score = batch.rewards[order] @ torch.tensor(REWARD_WEIGHTS)
    scored = Scored(
        sequences=sequences, logprobs=batch.old[order], ref_logprobs=batch.reference[order],
        values=None, scores=score, clipped_scores=score, parts=parts, ended=batch.ended[order],
        sampler_logprobs=batch.sampler[order],
        training_pass=TrainingPass(logprobs[order], torch.zeros(ROWS, LONGEST), None),
    )  # fmt: skip

    def experience_and_terms(world):
        found = make_experience(scored, config, kl_coef=config.kl.coef, world=world)
        return found, terms_of([found.sequences.action_mask], config, world)

    ((experience, terms),) = on_threads(1, experience_and_terms)
    models = SimpleNamespace(actor=SimpleNamespace(device=torch.device("cpu")))
    setup = SimpleNamespace(models=models, config=config)
    loss, _ = actor_loss(setup, experience, terms, kl_coef=config.kl.coef)
    loss.backward()
    return loss.detach().float(), logprobs.grad


def config_of(**options) -> GRPOConfig:
    model = {"optimizer": {"learning_rate": 1e-6}}
    named = zip("ab", REWARD_WEIGHTS, strict=True)
    rewards = [{"regex": name, "name": name, "weight": weight} for name, weight in named]
    return GRPOConfig.model_validate(
        {
            "rollout_batch_size": ROWS, "minibatch_size": ROWS, "responses_per_prompt": ANSWERS,
            "ppo_epochs": 2,  # the log-probabilities are not those of the policy that sampled
            "rewards": rewards, "sampling": {"max_response_tokens": LONGEST}, "actor": model,
            "kl": {"coef": 0.0, "place": "loss"}, "sampler_correction": None,
        }
        | options
    )  # fmt: skip


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], *, loss: bool = True):
    """Loss and gradient are those of TRL."""
    difference = (found[1] - expected[1]).abs().max() / expected[1].abs().max()
    assert difference <= BOUND, f"gradient: {difference:.1e}"
    if loss:
        torch.testing.assert_close(found[0], expected[0], rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize("name", GRPO_SETTINGS)
def test_grpo(trainer_of, on_threads, name):
    """The KL's gradient is that of TRL's, and its value is not."""
    ours, theirs = GRPO_SETTINGS[name]
    trainer, config = trainer_of("GRPO", **theirs), config_of(**ours)
    trainer.use_vllm = config.correction is not None
    for seed in SEEDS:
        batch = Batch.random(seed, trainer.processing_class.eos_token_id)
        expected = of_trl(trainer, batch)
        check(of_ours(config, batch, on_threads), expected, loss=not config.kl.coef)


@pytest.mark.parametrize("name", RLOO_SETTINGS)
def test_rloo(trainer_of, on_threads, name):
    """The policy still is the one that sampled. TRL sums over tokens where we divide by a constant;
    the ratio is of the response there, and of a token here."""
    ours, theirs = RLOO_SETTINGS[name]
    trainer = trainer_of("RLOO", **theirs)
    config = config_of(advantage="rloo", denominator="constant", **ours)
    for seed in SEEDS:
        batch = Batch.random(seed, trainer.processing_class.eos_token_id)
        batch = replace(batch, logprobs=batch.old)
        _, gradient = of_ours(config, batch, on_threads)
        check((None, LONGEST * gradient), of_trl(trainer, batch), loss=False)


def rows_of(batch: Batch) -> dict[str, Tensor]:
    """What TRL's DPO and KTO read; each prompt has one token."""
    prompt, mask = torch.full((ROWS, 1), 5), batch.mask.long()
    return {
        "input_ids": torch.cat([prompt, batch.ids], 1),
        "attention_mask": torch.cat([torch.ones_like(prompt), mask], 1),
        "completion_mask": torch.cat([torch.zeros_like(prompt), mask], 1),
    }


@pytest.mark.parametrize("name", DPO_SETTINGS)
def test_dpo(trainer_of, name):
    """The first half of the rows are chosen answers."""
    options = DPO_SETTINGS[name]
    trainer = trainer_of("DPO", loss_type=[name], **options)
    config = DPOConfig.model_validate(SUPERVISED | {"loss": name} | options)
    for seed in SEEDS:
        batch = Batch.random(seed, trainer.processing_class.eos_token_id)

        def ours(logprobs, reference, batch=batch):
            log_ratios, names = logprobs - reference, ("chosen", "rejected")
            given = {
                "logprobs": logprobs, "log_ratios": log_ratios, "lengths": batch.mask.sum(1),
            }  # fmt: skip
            sides = {
                f"{side}_{name}": half
                for name, values in given.items()
                for side, half in zip(names, values.chunk(2), strict=True)
            }
            halves = zip(names, reference.chunk(2), strict=True)
            sides |= {f"ref_{side}_logprobs": half for side, half in halves}
            return call_with(DPO_LOSS.load(config.loss), config, **sides)

        check_answers(trainer, batch, rows_of(batch), ours)


@pytest.mark.parametrize("name", KTO_SETTINGS)
def test_kto(trainer_of, name):
    """A wider batch has the answers to other prompts: each is likelier by 0.57 nats than in the
    reference."""
    own_words, words_of_trl = KTO_SETTINGS[name]
    trainer = trainer_of("KTO", **words_of_trl)
    config = KTOConfig.model_validate(SUPERVISED | own_words)
    mismatched = torch.full((ROWS, LONGEST + 1), 0.5 / LONGEST)
    kl = mismatched.sum(1).mean() if config.kl == "mismatched" else torch.zeros(())
    for seed in SEEDS:
        batch = Batch.random(seed, trainer.processing_class.eos_token_id)
        is_good = batch.rewards[:, 0] > 0.4
        inputs = rows_of(batch) | {"label": is_good}
        inputs |= {f"KL_{key}": pad(value, (0, 1)) for key, value in rows_of(batch).items()}

        def ours(logprobs, reference, is_good=is_good):
            return kto_loss(
                logprobs - reference, is_good, kl, beta=config.beta,
                desirable_weight=config.desirable_weight,
                undesirable_weight=config.undesirable_weight,
            )  # fmt: skip

        check_answers(trainer, batch, inputs, ours, mismatched)


def check_answers(trainer, batch: Batch, inputs: dict, ours, mismatched: Tensor | None = None):
    """Compare a loss of whole answers. The models of TRL give log-probabilities, and for the wider
    batch of KTO the policy gives those of `mismatched`, and the reference 0."""
    leaves = [batch.logprobs.clone().requires_grad_() for _ in range(2)]
    policy, other = (torch.where(batch.mask, leaf, 0.0) for leaf in leaves)
    reference = torch.where(batch.mask, batch.reference, 0.0)

    def model(found: Tensor, of_others: Tensor | None):
        def forward(input_ids, **_):
            logprobs = found if input_ids.shape[1] == LONGEST + 1 else of_others
            none = torch.zeros_like(logprobs)
            return SimpleNamespace(
                log_probs=logprobs, entropy=none, mean_logits=none, is_top1=none.bool()
            )

        return forward

    trainer.ref_model = model(reference, None if mismatched is None else 0 * mismatched)
    loss = trainer._compute_loss(model(other, mismatched), inputs, return_outputs=False)
    loss.backward()
    total, count = ours(policy.sum(1), reference.sum(1))
    (total / count).backward()
    check(((total / count).detach(), leaves[0].grad), (loss.detach(), leaves[1].grad))
