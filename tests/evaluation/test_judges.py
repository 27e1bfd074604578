"""Judges by true answers, and judged lists of texts."""

import subprocess
import sys

import pytest

from rlhf_pipeline.errors import ConfigError, StageError
from rlhf_pipeline.evaluation.judges import evaluate
from rlhf_pipeline.scoring.true_answers import AGREES


@pytest.mark.parametrize(
    ("kind", "true", "given", "agrees"),
    [
        ("exact", "Paris", " paris.", True),
        ("exact", "Paris", "It is Paris", False),
        ("contains", "New  York", "I think new york it is", True),
        ("contains", "Rome", "Paris", False),
        ("last_number", "#### 1,234", "First 7, so the answer is 1234.0.", True),
        ("last_number", "5", "5 is wrong, it is 6", False),
        ("last_number", "-3", "3", False),
        ("last_number", "none", "none", False),  # no number is no agreement
    ],
)
def test_what_agrees_with_the_true_answer(kind, true, given, agrees):
    assert AGREES[kind](true, given) is agrees


PROMPTS = ["1 + 1?", "2 + 2?", [{"role": "user", "content": "3 + 3?"}], "4 + 4?"]
TRUE = ["2", "4", "6", "8"]
OURS = ["2", "It is 4.", "6", "9 "]
THEIRS = ["I say 2", "It is 5", "It is 6", "8"]


def brief(prompts, responses):
    assert [prompt[-1]["content"][0] for prompt in prompts] == ["1", "2", "3", "4"]
    return [-len(response) for response in responses]


def right(prompts, responses, references):
    return [true in response for true, response in zip(references, responses, strict=True)]


def test_win_rates_and_intervals_by_hand():
    """brief: two wins, a tie (OURS[3] and THEIRS[3] have one character) and a loss of "It is 4.".

    right: a win, two ties and a loss. Wilson's interval of 2.5 of 4 with the variance that one tie
    leaves, 0.625 * 0.375 - 1 / 16, at z = 1.96: (1.1052 -+ 0.6290) / 1.9604.
    """
    judges = [brief, right, {"reference": "exact"}]
    found = evaluate(PROMPTS, OURS, THEIRS, judges, references=TRUE, trained_on=[])
    rate = found.win_rate
    assert [rate[name] for name in ("rate", "wins", "ties", "losses", "n")] == [0.625, 2, 1, 1, 4]
    assert (rate["lower"], rate["upper"]) == pytest.approx((0.2429063, 0.8846210), abs=1e-6)
    assert found["win_rates"]["right"]["rate"] == 0.5
    assert found.summary == (
        "By the brief judge, no difference is shown: it prefers the candidate's answer to the "
        "baseline's on 62.5% (95%: 24.3% to 88.5%) of 4 prompts. The right judge prefers it on "
        "50.0% (95%: 19.8% to 80.2%). The exact judge prefers it on 62.5% (95%: 24.3% to 88.5%)."
    )
    candidate = found["policies"]["candidate"]
    assert (candidate["strict_accuracy"], candidate["lenient_accuracy"]) == (0.5, 0.75)
    # Strictly right are 2 against 1: two wins, a tie and a loss again, and 2 p - 1 of the above.
    change = found["changes"]["strict_accuracy"]
    assert change["change"] == 0.25
    assert (change["lower"], change["upper"]) == pytest.approx((-0.5141874, 0.7692420), abs=2e-6)
    assert not candidate.keys() & {"kl", "sft_perplexity", "response_tokens", "eos_fraction"}
    assert "decoding" not in found


def test_a_judge_decides_by_strict_accuracy():
    judges = [{"reference": "final_answer", "name": "strict"}, {"reference": "last_number"}]
    found = evaluate(PROMPTS, OURS, THEIRS, judges, references=TRUE)
    assert found["judge"] == "strict"
    means = [policy["strict_score"] for policy in found["policies"].values()]
    assert means == [policy["strict_accuracy"] for policy in found["policies"].values()]
    assert means == [0.25, 0.5]


def test_a_judge_that_the_candidate_was_trained_on_does_not_decide():
    judges = [{"callable": lambda p, r: [len(text) for text in r], "name": "long"}, brief]
    found = evaluate(PROMPTS, OURS, THEIRS, judges, trained_on=["long"])
    assert found["judge"] == "brief" and found["judges"]["brief"]["state"] == "independent"
    alone = evaluate(PROMPTS, OURS, THEIRS, judges[:1], trained_on=["long"])
    assert "The candidate was trained to maximize the score of long, so this" in alone.summary


def test_a_judge_of_a_training_that_nobody_knows_is_not_independent():
    found = evaluate(PROMPTS, OURS, THEIRS, [brief])
    assert found["judges"]["brief"]["state"] == "unknown"
    assert "Nobody recorded whether the training of the baseline and the candidate" in found.summary
    with pytest.raises(ConfigError, match=r"trained_on: found 'breif' \(did you mean brief\?\)"):
        evaluate(PROMPTS, OURS, THEIRS, [brief], trained_on=["breif"])


def test_a_judge_may_be_named_by_its_place(tmp_path):
    (tmp_path / "own.py").write_text("def longer(prompts, responses): return map(len, responses)\n")
    places = [f"{tmp_path}/own.py:longer", "rlhf_pipeline.scoring.true_answers:agreement"]
    found = evaluate(PROMPTS, OURS, THEIRS, places[:1])
    assert found.win_rate["losses"] == 2 and list(found["win_rates"]) == ["longer"]
    with pytest.raises(ConfigError, match=r"agreement cannot be called with \(prompts, responses"):
        evaluate(PROMPTS, OURS, THEIRS, places[1:])


def test_judges_of_texts_import_no_torch():
    program = (
        "import sys; from rlhf_pipeline import evaluate\n"
        "evaluate(['a', 'b'], ['c', 'd'], ['e', 'f'], [{'regex': 'c'}])\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_judges_run_programs_and_functions_in_processes(tmp_path):
    (tmp_path / "own.py").write_text(
        "async def longer(prompts, responses): return [len(responses[0])]\n"
    )
    isolated = {"callable": f"{tmp_path}/own.py:longer", "processes": 2, "timeout_s": 60}
    ours, theirs = ["x = 2"] * 4, ["```python\nx = 1 + 2\n```"] * 4
    judges = [isolated, {"code": "python"}]
    found = evaluate(PROMPTS, ours, theirs, judges, references=["assert x == 2"] * 4)
    assert found["win_rates"]["longer"]["losses"] == found["win_rates"]["code"]["wins"] == 4


def tokens(prompts, responses, scored): ...


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": OURS[1:]}, "answers: found 3 values, expected 4 texts, one for each"),
        ({"answers": [*OURS[1:], None]}, "answers: found 4 values, expected 4 texts"),
        ({"prompts": [], "answers": [], "baseline_answers": []}, "found 0 values, expected some"),
        ({"prompts": ["?"], "answers": ["a"], "baseline_answers": ["b"]},
         "prompts: found 1, expected at least 2, for an interval"),
        ({"judges": []}, "judges: found none, expected at least one"),
        ({"judges": [brief, brief]}, r"judges: found two called '\w+\.brief'"),
        ({"judges": [right]}, r"judges\.0: found right, which needs references, .* Fix: pass"),
        ({"judges": [brief, {"reference": "exact"}]}, r"judges\.1: found exact, which needs ref"),
        ({"judges": [{"callable": lambda prompts, responses: [1.0], "processes": 1}]},
         "lambda ended its process with code 1 "),
        ({"judges": [tokens]}, "found tokens, which needs scored, expected a judge of texts"),
        ({"judges": [{"model": "./m"}]}, "found m, which needs a model, expected a judge of texts"),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_named(changes, message):
    given = {"prompts": PROMPTS, "answers": OURS, "baseline_answers": THEIRS, "judges": [brief]}
    with pytest.raises((ConfigError, StageError), match=message):
        evaluate(**given | changes)
