"""The program on one rank, with tiny models: every judge scores every answer of every policy."""

import json
import shutil
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from deepspeed import DeepSpeedEngine
from rank_fixtures import as_artifact

from rlhf_pipeline.config.evaluate import CandidateConfig, EvaluateConfig
from rlhf_pipeline.data.gold import gold_score
from rlhf_pipeline.data.sources import synthetic
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.batches import sampled_rows
from rlhf_pipeline.distributed.frozen_model import frozen_model
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.evaluation import evaluate
from rlhf_pipeline.evaluation.judges import AnswerBatch, RewardModelJudge
from rlhf_pipeline.models.forward import sequence_scores
from rlhf_pipeline.models.loading import freeze, load_policy, load_tokenizer
from rlhf_pipeline.models.scalar_head import load_scores, store_score_mean
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.runtime.job import LaunchedJob, as_json
from rlhf_pipeline.runtime.manifest import Manifest

QUESTIONS = list(synthetic._questions())[:8]
REFERENCES = ["a", None, "bb", "ccc", "dddd", "eeeee", "f", "g"]
JUDGE = """
def words(prompts, responses, references):
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [
        len(response.split()) + len(reference or "")
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
    prompts = tmp_path_factory.mktemp("prompts")
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    ids = [
        tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False)
        for m in messages
    ]
    columns = {"prompt_ids": ids, "messages": messages, "source": ["synthetic"] * 8}
    table = pa.table(columns | {"reference": REFERENCES})
    with (
        pa.OSFile(str(prompts / "test.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    for folder in (reward_model, prompts):
        TokenContract.read(sft).write(folder)
    models = {"sft_model": sft, "ppo_model": ppo, "reward_model": reward_model}
    return {"prompts": prompts} | {name: as_artifact(folder) for name, folder in models.items()}


def test_every_judge_scores_every_answer(inputs, world, tmp_path):
    (tmp_path / "my.py").write_text(JUDGE)
    config = EvaluateConfig(
        prompts=6, samples=2, micro_batch_tokens=64, sampling={"max_response_tokens": 6},
        judges=[f"{tmp_path}/my.py:words"],
    )  # fmt: skip
    candidate = CandidateConfig(name="ppo", caveats={"words": "Nobody trained on words."})
    blocks = as_json({"evaluate": config, "candidate": candidate})
    paths = inputs | {"judges.0": tmp_path / "my.py"}
    metrics = evaluate.main(LaunchedJob("evaluate", "f", 3, blocks, paths, {}, tmp_path, 60.0))

    export = tmp_path / "export"
    answers = [json.loads(line) for line in (export / "answers.jsonl").read_text().splitlines()]
    assert [(a["policy"], a["row"]) for a in answers] == [
        (policy, row) for policy in ("sft", "ppo") for row in sampled_rows(8, 6, seed=3)
    ]
    for answer in answers:
        messages = [{"role": "user", "content": QUESTIONS[answer["row"]]}]
        assert answer["source"] == "synthetic"
        assert answer["prompt"] == f"User: {QUESTIONS[answer['row']]}"
        reference = REFERENCES[answer["row"]] or ""
        assert answer["words_score"] == len(answer["response"].split()) + len(reference)
        assert answer["gold_score"] == gold_score("synthetic", messages, answer["response"])
    evaluation = json.loads((export / "evaluation.json").read_text())
    assert list(evaluation["win_rates"]) == ["score", "gold", "words"]
    assert evaluation["judge"] == "gold"
    assert metrics["ppo/words_score"] == evaluation["policies"]["ppo"]["words_score"]
    assert metrics["win_rate/words"] == evaluation["win_rates"]["words"]["rate"]
    report = (export / "report.md").read_text()
    assert "By the words judge," in report and "Nobody trained on words." in report


def run(inputs, folder, **changes):
    """The metrics of a small evaluation, and the texts of its report and answers."""
    fields = {"prompts": 6, "samples": 2, "sampling": {"max_response_tokens": 6}} | changes
    config = EvaluateConfig.model_validate(fields)
    blocks = as_json({"evaluate": config, "candidate": CandidateConfig(name="ppo")})
    folder.mkdir()
    metrics = evaluate.main(LaunchedJob("evaluate", "f", 3, blocks, inputs, {}, folder, 60.0))
    return metrics, (folder / "export" / "answers.jsonl").read_text()


def test_the_baseline_reads_the_answers_of_both_policies(inputs, world, tmp_path, monkeypatch):
    answer, given = evaluate.answer, []  # the candidate's answers, then the baseline's

    def recorded(policy, setup):
        given.append(answer(policy, setup))
        return given[-1]

    monkeypatch.setattr(evaluate, "answer", recorded)
    _, lines = run(inputs, tmp_path / "run")
    written = [json.loads(line)["sft_logprob"] for line in lines.splitlines()]
    sft = load_policy(inputs["sft_model"], "fp32").eval()
    expected = []
    for sequences in reversed(given):
        for row in range(len(sequences)):
            prompt = sequences.prompt_ids[row][sequences.prompt_mask[row].bool()]
            response = sequences.response_ids[row][sequences.response_mask[row]]
            with torch.no_grad():
                logits = sft(input_ids=torch.cat([prompt, response])[None]).logits[0]
            logits = logits[:, : TokenContract.read(inputs["sft_model"]).vocab_size]
            places = torch.arange(len(response)) + len(prompt) - 1
            chosen = logits[places].log_softmax(-1)[torch.arange(len(response)), response]
            expected.append(float(chosen.sum()))
    assert written == pytest.approx(expected, abs=1e-4)


def test_one_model_at_a_time_is_in_memory(inputs, world, tmp_path, monkeypatch):
    loaded = []

    def frozen(*arguments):
        assert [name for name, model in loaded if model() is not None] == []
        model = frozen_model(*arguments)
        loaded.append((type(model).__name__, weakref.ref(model)))
        return model

    monkeypatch.setattr(evaluate, "frozen_model", frozen)
    run(inputs, tmp_path / "run")
    assert [name for name, _ in loaded] == ["LlamaForCausalLM"] * 2 + ["TokenScores"]


def test_models_trained_in_shards_are_evaluated_in_shards(inputs, world, tmp_path, monkeypatch):
    sharded = {}
    for name, folder in inputs.items():
        sharded[name] = tmp_path / name
        shutil.copytree(folder, sharded[name])
        if name.endswith("_model"):
            manifest = Manifest.read(folder)
            engines = {"actor": {"zero_optimization": {"stage": 3}}}
            replace(manifest, deepspeed=engines).write(sharded[name])
    seen = []
    monkeypatch.setattr(
        evaluate, "frozen_model", lambda *a: seen.append(frozen_model(*a)) or seen[-1]
    )
    whole, in_shards = run(inputs, tmp_path / "a"), run(sharded, tmp_path / "b")
    assert [isinstance(model, DeepSpeedEngine) for model in seen] == [False] * 3 + [True] * 3
    assert whole == in_shards
    assert whole == run(sharded, tmp_path / "c", zero_stage=0)


def test_models_are_evaluated_in_the_precision_that_they_were_saved_in(
    inputs, world, tmp_path, monkeypatch
):
    policy = tmp_path / "policy"
    shutil.copytree(inputs["ppo_model"], policy)
    load_policy(inputs["ppo_model"], "bf16").save_pretrained(policy)
    precisions = []

    def frozen(load, settings, world):
        precisions.append(settings.precision)
        return frozen_model(load, settings, world)

    monkeypatch.setattr(evaluate, "frozen_model", frozen)
    changed = inputs | {"ppo_model": policy}
    run(changed, tmp_path / "a")
    run(changed, tmp_path / "b", precision="fp32")
    assert precisions == ["bf16", "fp32", "fp32"] + ["fp32"] * 3


def test_the_reward_model_scores_the_last_token_minus_the_mean(inputs):
    """A batch of several micro batches gives each answer the score of a batch of one."""
    model = freeze(load_scores(inputs["reward_model"], "fp32"))
    prompts, responses = [[5, 6, 7], [8, 9], [10]], [[11], [12, 13, 1], [14, 15]]
    judge = RewardModelJudge(model, 8, World(0, 1, torch.device("cpu")))
    sequences = collate(prompts, responses, pad_id=0)
    scores = judge.score(AnswerBatch(SimpleNamespace(sequences=sequences), None, []))
    for prompt, response, score in zip(prompts, responses, scores, strict=True):
        alone = sequence_scores(model, collate([prompt], [response], pad_id=0))
        assert score == pytest.approx(float(alone) - 0.1, abs=1e-5)
