"""Sources of rewards on one rank: what each one says of a response, their sum, and what none of them may say."""

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.models.loading import freeze, load_scores, load_tokenizer
from rlhf_pipeline.models.scalar_head import store_score_mean
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.rollout.reward_sources import Asked, FunctionSource, load_rewards
from rlhf_pipeline.rollout.scoring import Scored
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training import ppo
from rlhf_pipeline.training.experience import make_experience

PROMPTS = [[{"role": "user", "content": f"Question {n}?"}] for n in range(3)]
ASKED = Asked(PROMPTS, ["4", None, "6"], ["4", "five", "6"])
SCORED = Scored(None, None, None, None, torch.zeros(3), None)


def reward_model(sft, folder, seed, mean=None):
    """A reward model with a random head, of the policy's tokens."""
    model = load_scores(sft, "fp32", new_head=True)
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.classifier.score.weight)
    model.classifier.save_pretrained(folder)
    load_tokenizer(sft).save_pretrained(folder)
    TokenContract.read(sft).write(folder)
    if mean is not None:
        store_score_mean(folder, mean)
    return folder


@pytest.fixture(scope="module")
def inputs(make_model, tmp_path_factory):
    """A policy, its reward model, and eight prompts with true answers."""
    sft = make_model("llama", seed=1)
    prompts = tmp_path_factory.mktemp("prompts")
    tokenizer = load_tokenizer(sft)
    messages = [[{"role": "user", "content": f"what is {n}?"}] for n in range(8)]
    ids = [
        tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False)
        for m in messages
    ]
    table = pa.table(
        {
            "id": [str(n) for n in range(8)],
            "prompt_ids": ids,
            "source": ["files"] * 8,
            "messages": messages,
            "reference": [str(n) for n in range(8)],
        }
    )
    for name in ("train", "validation"):
        with (
            pa.OSFile(str(prompts / f"{name}.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table)
    TokenContract.read(sft).write(prompts)
    judge = reward_model(sft, tmp_path_factory.mktemp("reward"), seed=5, mean=0.1)
    return {"prompts": prompts, "sft_model": sft, "reward_model": judge}


@pytest.fixture(scope="module")
def contract(inputs):
    return TokenContract.read(inputs["sft_model"])


def config(*rewards, **changes) -> PPOConfig:
    model = {"optimizer": {"learning_rate": 1e-3, "warmup_fraction": 0.0, "eps": 1e-4}}
    fields = {
        "steps": 1, "rollout_batch_size": 8, "minibatch_size": 8, "micro_batch_size_per_gpu": 3, "evaluations": 1,
        "sampling": {"max_response_tokens": 6}, "actor": model, "critic": model, "rewards": rewards or ["trained"],
    }  # fmt: skip
    return PPOConfig.model_validate(fields | changes)


def job_of(inputs, folder):
    return LaunchedJob("ppo", "f", 1, {}, inputs, {}, folder, 60.0)


def run(config, inputs, world, folder):
    """The stage's loop; returns the models and the metrics lines."""
    setup = ppo.set_up(
        job_of(inputs, folder), config, TokenContract.read(inputs["sft_model"]), world
    )
    ppo.train(setup)
    lines = [
        json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    return setup.models, lines


def write(folder, source):
    (folder / "my.py").write_text(source)
    return folder / "my.py"


# --- the trained reward model ---------------------------------------------------------------------


def experience(rewards, inputs, contract, world, folder):
    """Of one rollout at the first step; whether the rewards went through a sum."""
    settings = config(*rewards)
    models = ppo.load_ppo_models(job_of(inputs, folder), settings, contract, world)
    rows = ppo.columns(ppo.load_rows(inputs["prompts"] / "train.arrow", world), np.arange(8))
    scored = ppo.roll_out(models, rows, settings, seed=1, step=1, slots=np.arange(8))
    experience = make_experience(
        scored, settings, kl_coef=0.1, score_mean=models.score_mean, world=world
    )
    return experience, models.rewards is not None


def test_the_default_s_experience_is_what_the_sum_makes_of_it_bit_by_bit(
    inputs, contract, world, tmp_path
):
    """The default takes no sum; a second source with weight 0 sends the same scores through one."""
    zero = str(write(tmp_path, "def zero(prompts, responses): return [7.0] * len(responses)"))
    plain, summed = experience(["trained"], inputs, contract, world, tmp_path)
    assert not summed
    with_zero = {"callable": f"{zero}:zero", "weight": 0.0}
    other, summed = experience(
        ["trained", with_zero],
        inputs | {"rewards.1": tmp_path / "my.py"},
        contract,
        world,
        tmp_path,
    )
    assert summed
    assert torch.equal(plain.returns, other.returns) and torch.equal(
        plain.advantages, other.advantages
    )


def test_the_default_reads_no_references(inputs, world, tmp_path):
    """Its prompts' table may be one without them, and its score is centred by the stored mean."""
    table = ppo.load_rows(inputs["prompts"] / "train.arrow", world).drop_columns(["reference"])
    (tmp_path / "prompts").mkdir()
    for name in ("train", "validation"):
        path = tmp_path / "prompts" / f"{name}.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    models, (line,) = run(config(), inputs | {"prompts": tmp_path / "prompts"}, world, tmp_path)
    assert models.score_mean == 0.1 and models.rewards is None
    assert not any(name.startswith("reward/") for name in line)
    zero = {
        "rewards.0": write(tmp_path, "def zero(prompts, responses): return [0] * len(responses)")
    }
    with pytest.raises(
        ArtifactError, match="the prompts have no column reference; run stage split again"
    ):
        run(
            config(f"{tmp_path}/my.py:zero"),
            inputs | zero | {"prompts": tmp_path / "prompts"},
            world,
            tmp_path,
        )


# --- the sum --------------------------------------------------------------------------------------


def test_the_weighted_sum_by_hand(inputs, contract, world, tmp_path):
    """Scores 1.1, 0.1, -0.9 less the mean 0.1 are 1, 0, -1; twice that and half of (4, 2, 0) are 4, 1, -2."""
    source = "def four_two_none(prompts, responses): return [4, 2.0, False]"
    given = {"rewards.1": write(tmp_path, source)}
    settings = config(
        {"model": "trained", "weight": 2},
        {"callable": f"{tmp_path}/my.py:four_two_none", "weight": 0.5},
    )
    rewards = load_rewards(
        job_of(inputs | given, tmp_path), settings, contract, world, trained_mean=0.1
    )
    rollout = collate([[5], [6], [7]], [[8, contract.eos_id], [9], [10]], contract.pad_id)
    scored = replace(SCORED, rollout=rollout, scores=torch.tensor([1.1, 0.1, -0.9]))
    total = rewards(scored, {"messages": PROMPTS, "reference": [None] * 3})
    torch.testing.assert_close(total.scores, torch.tensor([4.0, 1.0, -2.0]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        total.parts["trained"], torch.tensor([1.0, 0.0, -1.0]), rtol=1e-5, atol=1e-6
    )
    assert total.parts["four_two_none"].tolist() == [4.0, 2.0, 0.0]


def test_each_source_has_a_metric_in_training_and_held_out(inputs, world, tmp_path):
    given = {
        "rewards.1": write(tmp_path, "def three(prompts, responses): return [3.0] * len(responses)")
    }
    (tmp_path / "alone").mkdir()
    alone = run(config(), inputs, world, tmp_path / "alone")[1][0]
    both = config("trained", {"callable": f"{tmp_path}/my.py:three", "weight": 0.5})
    _, (line,) = run(both, inputs | given, world, tmp_path)
    assert line["reward/trained"] == pytest.approx(alone["objective/score"], abs=1e-6)
    assert line["reward/three"] == line["validation/reward/three"] == 3.0
    assert line["objective/score"] == pytest.approx(alone["objective/score"] + 1.5, abs=1e-5)
    assert line["validation/score"] == pytest.approx(
        line["validation/reward/trained"] + 1.5, abs=1e-5
    )


def test_without_the_trained_reward_model_it_is_no_judge_and_the_critic_starts_from_it(
    inputs, world, tmp_path
):
    given = {
        "rewards.0": write(tmp_path, "def one(prompts, responses): return [1.0] * len(responses)")
    }
    models, (line,) = run(config(f"{tmp_path}/my.py:one"), inputs | given, world, tmp_path)
    assert models.reward_model is None and models.critic is not None
    assert line["objective/score"] == line["validation/score"] == 1.0
    assert not any(name.startswith("reward/") for name in line)


# --- functions ------------------------------------------------------------------------------------


def function(source: str, name: str = "f") -> FunctionSource:
    scope: dict = {}
    exec(source, scope)
    return FunctionSource(f"my.py:{name}", scope[name])


def test_a_function_reads_prompts_responses_and_true_answers():
    exact = function(
        "def f(prompts, responses, references): return [a == b for a, b in zip(responses, references)]"
    )
    assert exact(SCORED, ASKED).tolist() == [1.0, 0.0, 1.0]
    last = function(
        "def f(prompts, responses): return [float(p[-1]['content'][9]) for p in prompts]"
    )
    assert last(SCORED, ASKED).tolist() == [0.0, 1.0, 2.0]
    tensor = function(
        "import torch\ndef f(prompts, responses): return torch.tensor([0.5] * len(responses))"
    )
    assert tensor(SCORED, ASKED).tolist() == [0.5] * 3


def test_responses_come_as_texts_without_special_tokens_and_white_space(
    inputs, world, contract, tmp_path
):
    source = "def f(prompts, responses, references):\n    assert responses == ['snow', ''], responses\n    return [0, 0]"
    given = {"rewards.0": write(tmp_path, source)}
    settings = config(f"{tmp_path}/my.py:f")
    rewards = load_rewards(job_of(inputs | given, tmp_path), settings, contract, world, None)
    tokenizer = load_tokenizer(inputs["sft_model"])
    ids = [tokenizer(" snow<|end|>")["input_ids"], [contract.eos_id]]
    rollout = collate([[5], [5]], ids, contract.pad_id)
    rewards(replace(SCORED, rollout=rollout), {"messages": PROMPTS[:2], "reference": [None, None]})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(prompts, responses): return [1.0]", "my.py:f returned 1 results for 3 responses, the first to the prompt"),
        ("def f(prompts, responses): return 1.0", "my.py:f failed at the response '4' to the prompt [{'role': 'user', "
         "'content': 'Question 0?'}]: TypeError: 'float' object is not iterable"),
        ("def f(prompts, responses): return [1.0, 'x', 2.0]", "my.py:f returned 'x' for the response 'five' to the prompt "
         "[{'role': 'user', 'content': 'Question 1?'}]; return a finite number"),
        ("def f(prompts, responses): return [1.0, '3', 2.0]", "returned '3' for the response 'five'"),
        ("def f(prompts, responses): return [1.0, 2.0, None]", "returned None for the response '6'"),
        ("def f(prompts, responses): return [float('nan'), 1.0, 2.0]", "returned nan for the response '4'"),
        ("def f(prompts, responses): return [1.0, float('-inf'), 2.0]", "returned -inf for the response 'five'"),
        ("def f(prompts, responses): return [int(r) for r in responses]", "my.py:f failed at the response 'five' to the "
         "prompt [{'role': 'user', 'content': 'Question 1?'}]: ValueError: invalid literal"),
        ("def f(prompts, responses):\n    if len(responses) > 1: raise MemoryError('all')\n    return [1.0]",
         "my.py:f failed at 3 responses together, the first to the prompt [{'role': 'user', 'content': 'Question 0?'}]: "
         "MemoryError: all"),
    ],
)  # fmt: skip
def test_what_a_function_may_not_do(source, message):
    with pytest.raises(StageError) as refusal:
        function(source)(SCORED, ASKED)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "parameters", ["", "responses", "prompts, responses, answers", "prompts, *, responses"]
)
def test_a_function_with_other_parameters_is_refused_at_once(parameters):
    with pytest.raises(
        StageError, match=r"my.py:f cannot be called with \(prompts, responses\): .*define it as"
    ):
        function(f"def f({parameters}): ...")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import no_such_module",
            r"my.py:f cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("g = 1", "cannot be imported: AttributeError"),
        ("f = 1", "my.py:f is 1, not a function"),
    ],
)
def test_a_function_that_cannot_be_imported(inputs, contract, world, tmp_path, source, message):
    given = {"rewards.0": write(tmp_path, source)}
    with pytest.raises(StageError, match=message):
        load_rewards(
            job_of(inputs | given, tmp_path), config(f"{tmp_path}/my.py:f"), contract, world, None
        )


def test_a_module_s_function(inputs, contract, world, tmp_path, monkeypatch):
    write(tmp_path, "").rename(tmp_path / "own_rewards.py").write_text(
        "def f(prompts, responses): return [2.0] * 3"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {"rewards.0": tmp_path / "own_rewards.py"}
    rewards = load_rewards(
        job_of(inputs | given, tmp_path), config("own_rewards:f"), contract, world, None
    )
    assert rewards.sources["f"][1](SCORED, ASKED).tolist() == [2.0] * 3


# --- other reward models --------------------------------------------------------------------------


def model_source(reward, inputs, contract, world, folder):
    ((_, source),) = load_rewards(
        job_of(inputs, folder), config(reward), contract, world, None
    ).sources.values()
    return source


def rollout_of(contract):
    return replace(
        SCORED,
        rollout=collate([[5], [6, 6], [7]], [[8, 9, contract.eos_id], [9], [10]], contract.pad_id),
    )


def test_another_reward_model_of_the_same_tokens(inputs, contract, world, tmp_path):
    """By itself, row by row: its scalar at the last token."""
    other = reward_model(inputs["sft_model"], tmp_path / "other", seed=9)
    model = freeze(load_scores(other, "fp32"))
    rows = [[5, 8, 9, contract.eos_id], [6, 6, 9], [7, 10]]
    expected = torch.stack(
        [model(input_ids=torch.tensor([ids]), scores_to_keep=1)[0, 0] for ids in rows]
    )
    for mean, fields in ((0.0, {}), (0.5, {"mean": 0.5})):
        source = model_source({"path": str(other)} | fields, inputs, contract, world, tmp_path)
        torch.testing.assert_close(
            source(rollout_of(contract), ASKED), expected - mean, rtol=1e-5, atol=1e-5
        )
    store_score_mean(other, 0.25)
    source = model_source({"path": str(other)}, inputs, contract, world, tmp_path)
    torch.testing.assert_close(
        source(rollout_of(contract), ASKED), expected - 0.25, rtol=1e-5, atol=1e-5
    )
    assert not any(parameter.requires_grad for parameter in source.model.parameters())


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def foreign(request, make_model, tmp_path_factory):
    """A plain sequence classifier with one label, a chat template of its own, no token contract, and padding that is EOS."""
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("foreign")
    base = make_model(request.param, seed=3)
    torch.manual_seed(4)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    tokenizer = load_tokenizer(base)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{{ eos_token }}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def test_a_reward_model_of_other_tokens_reads_its_own_template(
    inputs, contract, world, tmp_path, foreign
):
    """By itself, row by row, as transformers scores a text without padding."""
    from transformers import AutoModelForSequenceClassification

    source = model_source(
        {"path": str(foreign), "retokenize": True}, inputs, contract, world, tmp_path
    )
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(foreign).eval(),
        load_tokenizer(foreign),
    )
    model.config.pad_token_id = 0  # a token that does not occur
    answers = zip(range(3), ASKED.responses, strict=True)
    texts = [f"[user] Question {n}?\n[assistant] {answer}\n<|end|>" for n, answer in answers]
    with torch.no_grad():
        expected = torch.stack(
            [model(**tokenizer(text, return_tensors="pt")).logits[0, 0] for text in texts]
        )
    torch.testing.assert_close(source(rollout_of(contract), ASKED), expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.01  # the texts are told apart


def test_a_dialogue_beyond_its_positions_is_refused(inputs, contract, world, tmp_path, foreign):
    source = model_source(
        {"path": str(foreign), "retokenize": True}, inputs, contract, world, tmp_path
    )
    long = replace(ASKED, responses=["short", "long " * 100, ""])
    with pytest.raises(
        StageError,
        match=r"has 128 positions, and \d+ tokens are to be scored: the response to .*tion 1",
    ):
        source(rollout_of(contract), long)


def test_other_tokens_are_refused_unless_texts_are_asked_for(inputs, contract, world, tmp_path):
    other = reward_model(inputs["sft_model"], tmp_path / "other", seed=9)
    fields = json.loads((other / "token_contract.json").read_text()) | {
        "vocabulary_digest": "0" * 64
    }
    (other / "token_contract.json").write_text(json.dumps(fields))
    with pytest.raises(
        ArtifactError,
        match=r"ppo.rewards.0: .*other does not speak the policy's tokens; set its retokenize",
    ):
        model_source({"path": str(other)}, inputs, contract, world, tmp_path)
    assert math.isfinite(
        model_source({"path": str(other), "retokenize": True}, inputs, contract, world, tmp_path)(
            rollout_of(contract), ASKED
        ).sum()
    )


def test_a_language_model_is_no_reward_model(inputs, contract, world, tmp_path):
    with pytest.raises(
        ArtifactError, match=r"is not a reward model: it has no weights for score.weight"
    ):
        model_source(
            {"path": str(inputs["sft_model"]), "retokenize": True},
            inputs,
            contract,
            world,
            tmp_path,
        )
