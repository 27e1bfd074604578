"""The program on one rank, with tiny models: every judge scores every answer of every policy."""

import json
import math
import shutil
import weakref
from dataclasses import replace
from itertools import compress
from statistics import mean

import pyarrow as pa
import pytest
import torch
from chat_server import chat_server, longer
from deepspeed import DeepSpeedEngine
from mlflow.utils.validation import _validate_metric_name
from rank_fixtures import as_artifact, write_table

from rlhf_pipeline.config.evaluate import CandidateConfig, EvaluateConfig
from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.data.sources.synthetic import generate, gold_score
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.batches import sampled_rows
from rlhf_pipeline.distributed.engine import frozen_model
from rlhf_pipeline.evaluation import answering, evaluate
from rlhf_pipeline.models.loading import load_policy, load_tokenizer
from rlhf_pipeline.models.scalar_head import load_scores, store_score_mean
from rlhf_pipeline.runtime.job import LaunchedJob, as_json
from rlhf_pipeline.runtime.manifest import Manifest, folder_digest
from rlhf_pipeline.scoring.reward_sources import ModelSource

QUESTIONS = [one.prompt[0].content for _, one in generate(SourceConfig(samples=8), 0)]
REFERENCES = ["a", "h", "bb", "ccc", "dddd", "eeeee", "f", "g"]
JUDGE = """
def words(prompts, responses, references):
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [
        len(response.split()) + len(reference)
        for response, reference in zip(responses, references, strict=True)
    ]
"""


@pytest.fixture(scope="module")
def inputs(make_model, tmp_path_factory):
    """Two policies and a reward model of one tokenizer, and eight prompts."""
    sft, ppo = make_model("llama", seed=1), make_model("llama", seed=2)
    tokenizer = load_tokenizer(sft)
    reward_model = tmp_path_factory.mktemp("reward_model")
    model = load_scores(sft, "fp32", new_head=True)
    torch.manual_seed(5)
    torch.nn.init.normal_(model.classifier.score.weight)
    model.classifier.save_pretrained(reward_model)
    store_score_mean(reward_model, 0.1)
    reported(reward_model, 100, 1.0, 1.0)
    prompts = tmp_path_factory.mktemp("prompts")
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    ids = [
        tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False)
        for m in messages
    ]
    columns = {"prompt_ids": ids, "messages": messages, "source": ["synthetic"] * 8}
    contract = TokenContract.read(sft)
    write_table(pa.table(columns | {"reference": REFERENCES}), prompts, contract)
    (prompts / "train.arrow").rename(prompts / "test.arrow")
    contract.write(reward_model)
    models = {"sft_model": sft, "ppo_model": ppo, "reward_model": reward_model}
    return {"prompts": prompts} | {name: as_artifact(folder) for name, folder in models.items()}


def run(inputs, folder, *, seed=3, digests=None, **changes):
    """The metrics of a small evaluation, and its answers."""
    fields = {"prompts": 6, "sampling": {"max_response_tokens": 6}} | changes
    config = EvaluateConfig.model_validate(fields)
    blocks = as_json({"evaluate": config, "candidate": CandidateConfig(name="ppo")})
    folder.mkdir(parents=True)
    job = LaunchedJob("evaluate", "f", seed, blocks, inputs, digests or {}, folder, 60.0)
    metrics = evaluate.main(job)
    lines = (folder / "export" / "answers.jsonl").read_text().splitlines()
    return metrics, [json.loads(line) for line in lines]


def test_every_judge_scores_every_answer(inputs, world, tmp_path):
    judge = tmp_path / "my.py"
    judge.write_text(JUDGE)
    metrics, answers = run(
        inputs | {"judges.0": judge}, tmp_path / "run", micro_batch_tokens=64,
        judges=[f"{judge}:words"],
    )  # fmt: skip
    assert [(a["policy"], a["row"]) for a in answers] == [
        (policy, row)
        for policy in ("sft", "ppo", "sft_again")
        for row in sampled_rows(8, 6, seed=3)
    ]
    for answer in answers:
        messages = [{"role": "user", "content": QUESTIONS[answer["row"]]}]
        assert answer["source"] == "synthetic"
        assert answer["prompt"] == f"User: {QUESTIONS[answer['row']]}"
        assert answer["messages"] == messages
        reference = REFERENCES[answer["row"]]
        assert answer["words_score"] == len(answer["response"].split()) + len(reference)
        assert answer["gold_score"] == gold_score("synthetic", messages, answer["response"])
    evaluation = evaluation_in(tmp_path / "run")
    assert list(evaluation["win_rates"]) == ["gold", "words", "score"]
    assert evaluation["judge"] == "gold"
    assert metrics["ppo/words_score"] == evaluation["policies"]["ppo"]["words_score"]
    assert metrics["win_rate/words"] == evaluation["win_rates"]["words"]["rate"]
    files = sorted(path.name for path in (tmp_path / "run" / "export").iterdir())
    assert files == ["answers.jsonl", "evaluation.json"]


def logprobs_by_hand(model, prompt, response, size):
    """The log-probability of each token of a response, by transformers."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1, :size]
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()


def answers_of(answers, policy):
    return [answer for answer in answers if answer["policy"] == policy]


def evaluation_in(folder):
    return json.loads((folder / "export" / "evaluation.json").read_text())


def reported(model, pairs, margin, spread):
    """Write the report of a reward model."""
    report = {"pairs": pairs, "margin": margin, "margin_square": margin**2 + spread**2}
    report |= {"over_length": {"lower": 0.25}}
    (model / "reward_report.json").write_text(json.dumps(report))


def test_several_models_of_one_judge_judge_by_their_mean(inputs, world, tmp_path):
    """Two copies of the reward model score as it does; their comparisons are counted together.

    Margins 1 and 2 of 100 and 300 comparisons: mean 1.75, mean square (100 * 2 + 300 * 5) / 400 =
    4.25, so the variance is 1.1875, and the lower end 1.75 - 1.9659 sqrt(1.1875 / 399) = 1.6427.
    """
    other = shutil.copytree(inputs["reward_model"], tmp_path / "other")
    reported(other, 300, 2.0, 1.0)
    reported(inputs["reward_model"], 100, 1.0, 1.0)
    models = {"judge_model.0": inputs["reward_model"], "judge_model.1": other}
    _, answers = run(inputs | models, tmp_path / "run")
    for answer in answers:
        assert answer["judge_model_score"] == pytest.approx(answer["score"], rel=1e-6)
    evaluation = evaluation_in(tmp_path / "run")
    assert list(evaluation["win_rates"]) == ["gold", "judge_model", "score"]
    found = evaluation["accuracy"]["judge_model"]
    assert (found["margin"]["n"], found["margin"]["mean"]) == (400, 1.75)
    assert found["margin"]["lower"] == pytest.approx(1.6427484, rel=1e-5)
    assert "over_length" not in found
    assert evaluation["accuracy"]["score"]["over_length"] == {"lower": 0.25}


def test_all_policies_have_the_same_draws(inputs, world, tmp_path):
    """A candidate with the weights of SFT gives SFT's answers, as random as they are."""
    metrics, answers = run(inputs | {"ppo_model": inputs["sft_model"]}, tmp_path / "run")
    sft, ppo = answers_of(answers, "sft"), answers_of(answers, "ppo")
    assert [a["response"] for a in ppo] == [a["response"] for a in sft]
    assert len({a["response"] for a in sft}) == 6
    assert (metrics["paired_win_rate/score"], metrics["ppo/kl"]) == (0.5, 0)
    assert metrics["p_value/score"] == 1


def test_the_win_rate_compares_with_independent_draws_of_sft(inputs, world, tmp_path):
    metrics, answers = run(inputs, tmp_path / "run")
    sft, again, ppo = (answers_of(answers, name) for name in ("sft", "sft_again", "ppo"))
    assert {a["draw"] for a in again} == {1} and len(again) == 6
    assert not {a["response"] for a in again} & {a["response"] for a in sft}
    for name, theirs in (("paired_win_rate", sft), ("win_rate", again)):
        pairs = zip(ppo, theirs, strict=True)
        wins = [(a["score"] > b["score"]) + (a["score"] == b["score"]) / 2 for a, b in pairs]
        assert metrics[f"{name}/score"] == pytest.approx(sum(wins) / 6)


def test_greedy_answers_are_the_most_likely_tokens(inputs, world, tmp_path):
    """As transformers decodes greedily; the log-probabilities are those at temperature 1. A KL is
    a mean over sampled answers, so there is none."""
    sampling = {"max_response_tokens": 6, "temperature": 0}
    metrics, answers = run(inputs, tmp_path / "run", sampling=sampling)
    tokenizer = load_tokenizer(inputs["sft_model"])
    contract = TokenContract.read(inputs["sft_model"])
    model = load_policy(inputs["sft_model"], "fp32").eval()
    for given in answers_of(answers, "sft"):
        ids = tokenizer.apply_chat_template(
            given["messages"], add_generation_prompt=True, return_dict=False
        )
        written = []
        for _ in range(given["response_tokens"]):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids + written])).logits[0, -1]
            written.append(int(logits[: contract.vocab_size].argmax()))
        assert given["response"] == tokenizer.decode(written, skip_special_tokens=True).strip()
        total = sum(logprobs_by_hand(model, ids, written, contract.vocab_size))
        assert given["sft_logprob"] == pytest.approx(total, abs=1e-4)
    assert answers_of(answers, "sft_again") == []
    assert metrics["win_rate/score"] == metrics["paired_win_rate/score"]
    assert {answer["kl"] for answer in answers} == {None}
    assert not [name for name in metrics if "/kl" in name] and metrics["ppo/sft_perplexity"] > 1


def test_the_seed_chooses_the_prompts_and_the_draws(inputs, world, tmp_path):
    first, same, other = (
        answers_of(run(inputs, tmp_path / name, seed=seed, prompts=7)[1], "sft")
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert first == same
    assert [a["row"] for a in other] != [a["row"] for a in first]
    both = {a["row"]: a["response"] for a in first}
    shared = [(a["response"], both[a["row"]]) for a in other if a["row"] in both]
    assert len(shared) >= 6 and any(ours != theirs for ours, theirs in shared)


def test_the_best_of_n_answers_of_sft_leaves_the_rest_as_it_is(inputs, world, tmp_path):
    plain, answers = run(inputs, tmp_path / "a")
    more, same = run(inputs, tmp_path / "b", best_of_n=4)
    assert (more, same) == (plain, answers)
    curve = evaluation_in(tmp_path / "b")["best_of_n"]
    assert [point["n"] for point in curve] == [1, 2, 4]
    assert curve[0]["score"] == pytest.approx(plain["sft/score"])
    assert curve[0]["gold_score"] == pytest.approx(plain["sft/gold_score"])
    assert curve[0]["score"] < curve[1]["score"] < curve[2]["score"]  # the draws differ
    assert "best_of_n" not in evaluation_in(tmp_path / "a")


def test_several_answers_to_each_prompt(inputs, world, tmp_path):
    """The first draw of each policy is its only answer otherwise; all judges score all draws."""
    _, single = run(inputs, tmp_path / "a", best_of_n=2)
    metrics, answers = run(inputs, tmp_path / "b", best_of_n=2, answers_per_prompt=3)
    rows = sampled_rows(8, 6, seed=3).tolist()
    assert [(a["policy"], a["row"], a["draw"]) for a in answers] == [
        (policy, row, draw) for policy in ("sft", "ppo") for row in rows for draw in range(3)
    ]
    first = [a for a in single if a["draw"] == 0]
    assert [a for a in answers if a["draw"] == 0] == first
    assert len({(a["row"], a["response"]) for a in answers if a["policy"] == "sft"}) == 18
    assert all(a["gold_score"] is not None and math.isfinite(a["score"]) for a in answers)
    evaluation = evaluation_in(tmp_path / "b")
    assert (evaluation["prompts"], evaluation["answers_per_prompt"]) == (6, 3)
    assert evaluation["win_rates"]["score"]["n"] == 6
    crossed = [
        ours["score"] > theirs["score"]
        for ours in answers_of(answers, "ppo")
        for theirs in answers_of(answers, "sft")
        if ours["row"] == theirs["row"] and ours["draw"] != theirs["draw"]
    ]
    assert metrics["win_rate/score"] == pytest.approx(sum(crossed) / 36)
    assert evaluation["best_of_n"] == evaluation_in(tmp_path / "a")["best_of_n"]


def test_what_policies_achieve_in_tasks_stands_beside_the_answers(inputs, world, tmp_path):
    """The candidate, its average and SFT; MLflow takes the names."""
    ppo = tmp_path / "ppo"
    shutil.copytree(inputs["ppo_model"], ppo)
    shutil.copytree(inputs["sft_model"], ppo / "ema", ignore=lambda *_: ["manifest.json"])
    given = inputs | {"ppo_model": ppo}
    plain, answers = run(given, tmp_path / "a")
    right, half = [1.0] * 4, [1.0, 0.0, 1.0, 0.0]
    achieved = {
        "baseline": {"": [("my letters", "acc", 0.5, half), ("text", "perplexity", 9.0, None)]},
        "candidate": {
            "": [("my letters", "acc", 1.0, right), ("text", "perplexity", 8.0, None)],
            "_ema": [("my letters", "acc", 0.5, half), ("text", "perplexity", 9.0, None)],
        },
    }
    places = {f"tasks.{name}": tmp_path / name for name in achieved}
    for name, results in achieved.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "tasks.json").write_text(json.dumps(results))
    metrics, same = run(given | places, tmp_path / "b", tasks={"names": ["letters.yaml"]})
    assert same == answers and {name: metrics[name] for name in plain} == plain
    more = {name: value for name, value in metrics.items() if name not in plain}
    assert more["ppo/tasks/my_letters/acc"] == 1 and more["ppo/tasks/text/perplexity"] == 8
    assert more["ppo_ema/tasks/my_letters/acc"] == more["sft/tasks/my_letters/acc"] == 0.5
    measured = [f"my_letters/acc{end}" for end in ("", "_lower", "_upper")] + ["text/perplexity"]
    policies = ("sft", "ppo", "ppo_ema")
    assert more.keys() == {f"{p}/tasks/{name}" for p in policies for name in measured}
    for name in more:
        _validate_metric_name(name)
    ((task, change),) = evaluation_in(tmp_path / "b")["tasks"].items()
    assert (task, change["metric"], change["change"], change["n"]) == ("my letters", "acc", 0.5, 4)
    assert "tasks" not in evaluation_in(tmp_path / "a")


def test_the_perplexity_of_held_out_answers(inputs, world, tmp_path):
    """By hand, one row at a time; only the tokens that SFT learns count."""
    rows = range(5)
    table = pa.table(
        {
            "prompt_ids": [[5 + i] * (1 + i % 3) for i in rows],
            "response_ids": [[20 + i, 30 + i, 40 + i, 1] for i in rows],
            "loss_mask": [[True, i % 2 == 0, True, True] for i in rows],
        }
    )
    contract = TokenContract.read(inputs["sft_model"])
    held_out = write_table(table, tmp_path / "sft_rows", contract)
    metrics, _ = run(
        inputs | {"sft_rows": held_out}, tmp_path / "run",
        sampling={"max_response_tokens": 6, "temperature": 0.5},
    )  # fmt: skip
    perplexities = evaluation_in(tmp_path / "run")["perplexity"]
    assert list(perplexities) == ["sft", "ppo"]
    for policy, found in perplexities.items():
        model, learned = load_policy(inputs[f"{policy}_model"], "fp32").eval(), []
        for row in table.to_pylist():
            both = row["prompt_ids"], row["response_ids"]
            learned += compress(
                logprobs_by_hand(model, *both, contract.vocab_size), row["loss_mask"]
            )
        assert found == pytest.approx(math.exp(-mean(learned)), rel=1e-5)
        assert metrics[f"{policy}/held_out_perplexity"] == found


def test_further_reward_models_are_loaded_one_after_the_other(inputs, world, tmp_path, monkeypatch):
    """The reward model itself as a judge: its own scores, read as tokens and read as text."""
    tokenizer, text = load_tokenizer(inputs["sft_model"]), tmp_path / "text"
    shutil.copytree(inputs["reward_model"], text)
    tokenizer.save_pretrained(text)
    loaded, load = [], ModelSource.load

    def recorded(*arguments, **reading):
        assert [model() for model in loaded] == [None] * len(loaded)
        source = load(*arguments, **reading)
        loaded.append(weakref.ref(source.model))
        return source

    monkeypatch.setattr(ModelSource, "load", recorded)
    judges = [
        {"model": str(inputs["reward_model"]), "name": "tokens"},
        {"model": str(text), "retokenize": True, "name": "text"},
    ]
    places = {"judges.0": inputs["reward_model"], "judges.1": text}
    digests = {name: folder_digest(place) for name, place in places.items()}
    metrics, answers = run(inputs, tmp_path / "run", judges=judges, digests=digests)
    assert len(loaded) == 2
    for answer in answers:
        assert answer["tokens_score"] == pytest.approx(answer["score"], abs=1e-5)
    assert list(evaluation_in(tmp_path / "run")["win_rates"]) == ["gold", "tokens", "text", "score"]
    assert metrics["win_rate/tokens"] == metrics["win_rate/score"]


def test_a_chat_model_judges_and_is_asked_once_for_all_evaluations(inputs, world, tmp_path):
    def reply(first, second):
        return "[[5]]" if "is for" in first else longer(first, second)

    with chat_server(reply) as (url, requests):
        chat = {"openai": {"base_url": url, "model": "judge"}}
        judges = [chat, chat | {"rubric": "[[1]] is for {response}.", "name": "alone"}]
        work = tmp_path / "workspace" / "evaluate"
        metrics, answers = run(inputs, work / "a", judges=judges)
        asked = len(requests)
        pairs, alone = (metrics[f"pairwise_judges/{name}/calls"] for name in ("judge", "alone"))
        assert (asked, pairs > 0, alone > 0) == (pairs + alone, True, True)
        run(inputs, work / "b", judges=judges)
        assert len(requests) == asked
    assert evaluation_in(work / "b")["pairwise_judges"]["judge"]["cached"] == pairs
    assert {answer["alone_score"] for answer in answers_of(answers, "ppo")} == {0.5}
    pairs = zip(answers_of(answers, "sft_again"), answers_of(answers, "ppo"), strict=True)
    for theirs, ours in pairs:  # independent draws
        a, b = len(ours["response"]), len(theirs["response"])
        assert (theirs["judge_score"], ours["judge_score"]) == (0.0, (a > b) - (a < b))


def test_the_baseline_reads_the_answers_of_both_policies(inputs, world, tmp_path, monkeypatch):
    answer, given = answering.answer, []  # the candidate's answers, then the baseline's two draws

    def recorded(*arguments):
        given.append(answer(*arguments))
        return given[-1]

    monkeypatch.setattr(answering, "answer", recorded)
    _, answers = run(inputs, tmp_path / "run")
    written = [answer["sft_logprob"] for answer in answers]
    sft = load_policy(inputs["sft_model"], "fp32").eval()
    size = TokenContract.read(inputs["sft_model"]).vocab_size
    expected = []
    for sequences in (each.sequences for each in (given[1], given[0], given[2])):
        for row in range(len(sequences)):
            prompt = sequences.prompt_ids[row][sequences.prompt_mask[row].bool()]
            response = sequences.response_ids[row][sequences.action_mask[row]]
            expected.append(sum(logprobs_by_hand(sft, prompt, response, size)))
    assert written == pytest.approx(expected, abs=1e-4)


WORLD = """
class World:
    def __init__(self, seed):
        self.hidden, self.turns = seed % 100, 2

    def reset(self, task):
        return [{"role": "user", "content": f"find {self.hidden}"}]

    def step(self, answer):
        self.turns -= 1
        return [{"role": "user", "content": "no"}], float("a" in answer), self.turns == 0
"""


def test_policies_play_the_same_episodes_and_whole_episodes_are_judged(inputs, world, tmp_path):
    file = tmp_path / "world.py"
    file.write_text(WORLD)
    metrics, answers = run(
        inputs | {"code.environment": file}, tmp_path / "run", environment=f"{file}:World",
        generator="ends:Ends", judges=[{"environment": "reward"}, {"regex": "User: no"}],
        max_turn_tokens=6, max_prompt_tokens=40, sampling={"max_response_tokens": 60},
    )  # fmt: skip
    ours, theirs = (answers_of(answers, name) for name in ("ppo", "sft"))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["prompt"] == other["prompt"] and mine["prompt"].startswith("User: find ")
        episode = mine["episode"]
        roles = [turn["role"] for turn in episode["messages"]]
        assert roles == ["assistant", "user", "assistant"] and episode["turns"] == 2
        first, _, last = (turn["content"] for turn in episode["messages"])
        assert mine["response"] == f"{first}\n\nUser: no\n\nAssistant: {last}"
        assert mine["environment_score"] == episode["reward"] == ("a" in first) + ("a" in last)
        assert mine["regex_score"] == 0.0  # a function gets the last turn
        assert mine["ended"] and mine["response_tokens"] <= 12
    assert len({answer["prompt"] for answer in ours}) > 1
    assert metrics["ppo/turns"] == 2 and metrics["ppo/calls"] == 2


def trained_with(folder, target, **stages):
    """A copy of a model whose training had engines at ZeRO stages."""
    shutil.copytree(folder, target)
    engines = {name: {"zero_optimization": {"stage": stage}} for name, stage in stages.items()}
    replace(Manifest.read(folder), deepspeed=engines).write(target)
    return target


def test_models_trained_in_shards_are_evaluated_in_shards(inputs, world, tmp_path, monkeypatch):
    """Not beside one of stage 3: a reference in main memory, beside an actor that is not."""
    seen = []

    def recorded(*arguments):
        seen.append(frozen_model(*arguments))
        return seen[-1]

    monkeypatch.setattr(answering, "frozen_model", recorded)
    models = {name: inputs[name] for name in ("sft_model", "ppo_model", "reward_model")}
    sharded = {
        name: trained_with(folder, tmp_path / name, actor=3) for name, folder in models.items()
    }
    beside = trained_with(inputs["ppo_model"], tmp_path / "beside", actor=1, reference=3)
    whole, in_shards = run(inputs, tmp_path / "a"), run(inputs | sharded, tmp_path / "b")
    run(inputs | {"ppo_model": beside}, tmp_path / "c")
    found = [isinstance(model, DeepSpeedEngine) for model in seen]
    assert found == [False] * 3 + [True] * 3 + [False] * 3
    assert whole == in_shards
    assert whole == run(inputs | sharded, tmp_path / "d", zero_stage=0)
    assert whole == run(inputs | sharded, tmp_path / "e", gather_for_generation=False)


def test_one_model_at_a_time_is_loaded_in_the_precision_that_it_was_saved_in(
    inputs, world, tmp_path, monkeypatch
):
    policy = tmp_path / "policy"
    shutil.copytree(inputs["ppo_model"], policy)
    load_policy(inputs["ppo_model"], "bf16").save_pretrained(policy)
    precisions, loaded = [], []

    def frozen(load, settings, world):
        assert [model for model in loaded if model() is not None] == []  # one at a time
        precisions.append(settings.precision)
        model = frozen_model(load, settings, world)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(answering, "frozen_model", frozen)
    changed = inputs | {"ppo_model": policy}
    run(changed, tmp_path / "a")
    run(changed, tmp_path / "b", precision="fp32")
    assert precisions == ["bf16", "fp32", "fp32"] + ["fp32"] * 3
