"""The text of the page, as HTML."""

import json
import re

import pytest
from made_by_hand import HOSTILE, REGISTRATION, artifact, sealed

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.runtime.certificates import Certificate
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.runtime.usage import Forecast, Usage
from rlhf_pipeline.verdict.page import evaluation_page
from rlhf_pipeline.verdict.words import ABSENT


def headings(page):
    return re.findall(r"<h2[^>]*>([^<]*)</h2>", page)


def data(page):
    """What the script of the page reads."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(found)


def test_the_sections_follow_the_verdict(evaluation, models, tmp_path):
    earlier = artifact(tmp_path / "earlier", "ppo", [{"objective/score": 1.0}], ppo={"first": 1})
    page = evaluation_page(evaluation(), [*models, earlier], REGISTRATION)  # the last round counts
    assert "ppo.kl.coef" in page and "ppo.first" not in page
    assert headings(page) == [
        "Results", "Training of PPO", "Score and KL", "Distributions", "Reward model", "SFT",
        "Answers during training", "Answers", "Origin",
    ]  # fmt: skip
    assert "1 of 2 conditions hold. This is attempt 3 on this test set" in page
    assert "99.17%" in page
    assert "The gold judge decides. No training has optimized this judge." in page
    assert "No statistic can see what the judge itself does not see" in page
    optimized = "PPO was trained to maximize the score of the reward model, so this judge is not"
    assert page.index("It decides. No training has optimized this") < page.index(optimized)
    assert "<h3>Score of the reward model</h3>" in page
    assert '<p class="eyebrow">PPO against the SFT model, evaluation' in page
    assert "run-of-ppo" in page and "ppo.kl.coef" in page and "0123456789ab<" in page


def test_times_stand_beside_their_forecasts_and_proofs(evaluation, models, tmp_path):
    workspace, (ppo, reward, sft) = tmp_path / "workspace", map(Manifest.read, models)
    for made, resumed in ((ppo, False), (reward, True)):
        folder = workspace / made.stage / made.fingerprint[:16]
        folder.mkdir(parents=True)
        Usage(61.0, 3 * 2**30, resumed).write(folder)
    forecast = Forecast("ppo", ppo.config, ppo.ranks, (50.0, 60.0, 70.0), 2.5 * 2**30)
    forecast.write(workspace)
    proof = Certificate.of("sft", sft.config, sft.versions, sft.ranks, 7, {})
    proof.note("resume", "killed after step 2", None)
    proof.write(workspace)
    page = evaluation_page(evaluation(), models, None, workspace)
    assert "What training and evaluation took" in headings(page)
    rows = re.findall(r"<tr><th scope=.row.>(\w+)</th>(.*?)</tr>", page, re.DOTALL)
    cells = {name: re.sub(r"<[^>]+>", " ", row).split() for name, row in rows}
    assert cells["ppo"] == [*"61 s 60 s [50 s, 70 s]".split(), "3.00", "2.50", ABSENT]
    assert cells["reward_model"] == [ABSENT, ABSENT, "3.00", ABSENT, ABSENT]  # a part of the time
    assert cells["sft"] == [*[ABSENT] * 4, *"resume: 1 of 1 equal".split()]


def test_what_is_absent_is_left_out(evaluation):
    page = evaluation_page(evaluation(), [], None)
    assert "<h1>By the gold judge, no difference is shown.</h1>" in page
    assert headings(page) == ["Results", "Score and KL", "Distributions", "Answers", "Origin"]
    assert "No registration of this evaluation is here" in page
    for text in ("Perplexity of", "at equal length", "Results by source"):
        assert text not in page
    assert "All parameters" not in page


@pytest.mark.parametrize("changed", ["metrics.jsonl", "reward_report.json"])
def test_changed_curves_and_reports_are_refused(evaluation, models, changed):
    (models[1] / "reward_report.json").write_text("{}")
    sealed(models[1])
    (models[1] / changed).write_text("{ }")
    with pytest.raises(ArtifactError, match=f"{changed} was changed after stage reward_model"):
        evaluation_page(evaluation(), models, None)


def test_newer_fields_are_shown(evaluation):
    whole = {"rate": 0.5, "lower": 0.4, "upper": 0.6, "wins": 29, "ties": 1, "losses": 30, "n": 60}
    gain = {"gain": 0.2, "gain_lower": -0.1, "gain_upper": 0.5, "p_value": 0.0123}
    part = {"rate": 0.25, "lower": 0.2, "upper": 0.3, "n": 60}
    gold = whole | {"paired": whole | {"rate": 0.625} | gain, "length_controlled": part}
    made = evaluation(
        win_rates={"gold": gold},
        slices={"web": {"n": 60, "win_rates": {"gold": part}}},
        perplexity={"sft": 4.0, "ppo": 5.5},
        answers_per_prompt=2,
        pairwise_judges={"gold": {"pairs": 60, "inconsistent": 4}},
        best_of_n=[{"n": 4, "kl": 0.64, "score": 1.5, "gold_score": 2.0}],
    )
    page = evaluation_page(made, [], REGISTRATION)
    assert data(page)["unit"] == "pairs"
    for text in (
        "Sign test: p = 0.012. Gain: +0.20 of the scores&#39; spread (-0.10 to +0.50).",
        "and on 62.5% (95%: 40.0% to 60.0%) with equal draws.",
        "With answers of equal length, it would prefer PPO&#39;s on 25.0%",
        "Results by source",
        "the gold judge, 60 prompts",
        "SFT 4.00, PPO 5.50. A rise shows what the training for the judge costs.",
        "best of 4",
        "pairs 60, inconsistent 4",
        "60 held-out prompts, 2 times each (",
    ):
        assert text in page, text


def test_the_curve_of_a_function_carries_its_name(evaluation, models):
    """The score of the test prompts is that of the reward model, so it is not on the same path."""
    nobody = {"state": "independent", "by": {}}
    judges = {"gold": nobody, "score": nobody}
    page = evaluation_page(evaluation(rewards=["correct"], judges=judges), models, None)
    assert "<h3>Score of correct</h3>" in page and "<h3>Score of correct against √KL</h3>" in page
    assert "Score of the reward model" not in page and "not independent" not in page
    assert page.count("No training has optimized this judge.") == 3


def test_the_answers_of_training_are_shown_by_prompt(evaluation, models):
    page = evaluation_page(evaluation(), models, None)
    assert re.findall(r"<caption>([^<]*)</caption>", page) == [
        "User: how?\n\nUser: a?", "User: how?\n\nUser: b?"
    ]  # fmt: skip
    shown = re.findall(r'<td class="text">(.*?)</td>', page)
    assert [text for text in shown if text.startswith("b")] == [
        f"b after step {step}" for step in (2, 4, 6, 8)
    ]
    assert "&lt;/script&gt;" in shown[0]
    assert '<td class="number" data-label="score">1.50</td>' in page


def test_the_report_of_the_reward_model_is_shown(evaluation, models):
    rate = {"rate": 0.75, "lower": 0.6, "upper": 0.85, "n": 40}
    bins = [{"n": 9, "confidence": 0.9, "accuracy": 0.7}]
    report = {"calibration": {"error": 0.034, "bins": bins}, "length_correlation": None}
    report |= {"halves": [0.7, 0.8], "sources": {"web": rate}}
    (models[1] / "reward_report.json").write_text(json.dumps(report))
    sealed(models[1])
    page = evaluation_page(evaluation(), models, None)
    assert "calibration error 0.03, rank correlation of score and length -," in page
    assert "on the even and on the odd rows 0.70 and 0.80." in page
    assert "accuracy on 40 comparisons" in page


def test_every_answer_has_a_row_with_its_values_and_no_text_can_end_the_script(evaluation, models):
    """Names of judges and sources, prompts and answers come from users and models."""
    page = evaluation_page(evaluation(), models, REGISTRATION)
    assert page.count("</script>") == 2
    assert "onerror='window" not in page
    table = data(page)
    assert [column["name"] for column in table["columns"]] == [
        "gold", "reward model", "tokens", "KL",
    ]  # fmt: skip
    assert len(table["rows"]) == 60
    assert table["rows"][6] == {
        "n": 7,
        "p": "User: question 6",
        "a": ["The answer to 6 is never the same.", "The answer to 6 is always the same."],
        "source": None,
        "v": [[0.0, -24.0], [0.0, 1.0], [16, 16], [0.1]],
    }
    assert table["rows"][0]["a"] == [HOSTILE, HOSTILE]
