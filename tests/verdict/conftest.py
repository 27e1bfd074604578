"""An evaluation with the models that it compared, made by hand, and a real browser."""

import json

import pytest
from browser import chromium
from made_by_hand import HOSTILE, answer, artifact

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.verdict.answers import write_answers
from rlhf_pipeline.verdict.comparison import Standing, compare

SAMPLED = {
    step: [
        {"step": step, "prompt": f"User: how?\n\nUser: {name}?", "score": step / 4, "kl": 0.5,
         "answer": HOSTILE if (name, step) == ("a", 2) else f"{name} after step {step}"}
        for name in ("b", "a")
    ]
    for step in (2, 4, 6, 8)
}  # fmt: skip
"""The answers that PPO has sampled to two prompts."""


@pytest.fixture
def models(tmp_path):
    """SFT, reward model and PPO policy with the metrics of their training."""
    sft = [{"sft/loss": 3.0 / step, "validation/loss": 3.5 / step} for step in range(1, 9)]
    pairs = [
        {"reward_model/loss": 0.7, "reward_model/accuracy": 0.5 + step / 40,
         "validation/accuracy": 0.6}
        for step in range(1, 9)
    ]  # fmt: skip
    ppo = [
        {"objective/score": step / 4, "objective/kl": step / 2, "policy/entropy": 2.0 - step / 8,
         "policy/clip_fraction": 0.05, "value/explained_variance": 1 - 1 / step}
        | ({"validation/score": step / 4, "validation/kl": step / 2} if step % 2 == 0 else {})
        for step in range(1, 9)
    ]  # fmt: skip
    return [
        artifact(
            tmp_path / "models" / "ppo", "ppo", ppo, answers=SAMPLED, ppo={"kl": {"coef": 0.1}}
        ),
        artifact(tmp_path / "models" / "reward_model", "reward_model", pairs),
        artifact(tmp_path / "models" / "sft", "sft", sft),
    ]


@pytest.fixture
def evaluation(tmp_path):
    """Makes an evaluation of both policies on 60 prompts; `changes` are fields of its JSON."""

    def make(**changes):
        folder = tmp_path / "evaluation"
        folder.mkdir()
        answers = {name: [answer(row, name) for row in range(60)] for name in ("sft", "ppo")}
        standings = {
            "gold": Standing("independent"),
            "score": Standing("optimized", {"ppo": "rewards"}),
        }
        compared = compare(answers, EvaluateConfig(), standings, rewards=["trained"])
        compared |= changes
        (folder / "evaluation.json").write_text(json.dumps(compared))
        write_answers(answers, folder)
        inputs = {"prompts": "0123456789abcdef"}
        return artifact(folder, "evaluate", inputs=inputs, candidate={"name": "ppo"})

    return make


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium, which resolves no host name."""
    with chromium("--host-resolver-rules=MAP * ~NOTFOUND") as page:
        yield page
