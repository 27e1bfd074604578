"""A policy, reward models, and a rollout with known texts."""

import pytest
import torch
from pydantic import TypeAdapter

from rlhf_pipeline.config.rewards import Rewards
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.generation.records import Scored
from rlhf_pipeline.models.loading import freeze, load_tokenizer
from rlhf_pipeline.models.scalar_head import load_scores, store_score_mean
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.scoring.answers import Answered
from rlhf_pipeline.scoring.reward_sources import Reading, load_rewards

PROMPTS = [[{"role": "user", "content": f"Question {n}?"}] for n in range(3)]


@pytest.fixture(scope="session")
def policy(make_model):
    return make_model("llama", seed=1)


@pytest.fixture(scope="session")
def contract(policy):
    return TokenContract.read(policy)


@pytest.fixture
def make_reward_model(policy, tmp_path):
    """Makes a reward model with a random head that reads the policy's tokens."""

    def make(name="reward_model", seed=9, mean=None):
        folder = tmp_path / name
        model = load_scores(policy, "fp32", new_head=True)
        torch.manual_seed(seed)
        torch.nn.init.normal_(model.classifier.score.weight)
        model.classifier.save_pretrained(folder)
        load_tokenizer(policy).save_pretrained(folder)
        TokenContract.read(policy).write(folder)
        if mean is not None:
            store_score_mean(folder, mean)
        return folder

    return make


@pytest.fixture
def load(policy, contract, world, tmp_path):
    """Loads the sources of `ppo.rewards`; `files` are the inputs `rewards.<index>` of the job, and
    `trained` is the folder of the trained reward model."""

    def make(*rewards, files=None, digests=None, trained=None, score_clip=5.0):
        sources = TypeAdapter(Rewards).validate_python(rewards)
        inputs = (files or {}) | ({} if trained is None else {"reward_model": trained})
        job = LaunchedJob("ppo", "f", 1, {}, inputs, digests or {}, tmp_path / "ppo" / "f", 60.0)
        model = None if trained is None else freeze(load_scores(trained, "fp32"))
        reading = Reading([contract], 48, world)
        return load_rewards(job, sources, score_clip, reading, load_tokenizer(policy), model)

    return make


@pytest.fixture
def load_one(load):
    """Loads a single source."""

    def make(reward, **options):
        (source,) = load(reward, **options).sources.values()
        return source.score

    return make


@pytest.fixture
def trained(make_reward_model):
    """The folder of the trained reward model, whose mean score is 0.1."""
    return make_reward_model("trained", mean=0.1)


@pytest.fixture
def scored(contract):
    """Three responses; the trained reward model scores them 1.1, 0.1 and -0.9."""
    sequences = collate([[5], [6, 6], [7]], [[8, 9, contract.eos_id], [9], [10]], contract.pad_id)
    return Scored(sequences, None, None, None, torch.tensor([1.1, 0.1, -0.9]), None)


@pytest.fixture
def rows():
    """The prompts of the responses, as columns of the prompts' table."""
    return {"messages": PROMPTS, "reference": ["4", "5", "6"]}


@pytest.fixture
def answered(rows):
    """Three responses as text, unrelated to the tokens of `scored`."""
    return Answered(rows["messages"], rows["reference"], ["4", "five", "6"])
