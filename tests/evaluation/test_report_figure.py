"""The figure of an evaluation."""

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.evaluation.comparison import Answer, compare
from rlhf_pipeline.evaluation.report import plot_comparison


def answers(shift):
    return [
        Answer(
            i,
            f"p{i}",
            "a b",
            {"score": i / 10 + shift, "gold": i % 3 + shift},
            i / 20,
            -3.0,
            2,
            True,
        )
        for i in range(30)
    ]


def test_the_same_evaluation_gives_the_same_figure(tmp_path):
    given = {"sft": answers(0.0), "ppo": answers(0.5)}
    evaluation = compare(given, EvaluateConfig(), {"score"})
    for name in ("first", "second"):
        plot_comparison(evaluation, given, tmp_path / name)
    first = (tmp_path / "first").read_bytes()
    assert first.startswith(b"\x89PNG") and first == (tmp_path / "second").read_bytes()
