"""The bars of the histogram, and the texts of the figure."""

import pytest

from rlhf_pipeline.data.phase_files import bar_edges, draw


def test_bars_end_at_the_limit_and_48_bars_cover_the_lengths():
    # 99% of 200 lengths is 198; 198 / 48 is a little over 4, so a bar covers 5 lengths: ...; the
    # bar of 98 to 102 ends at the limit; the last one is of 198 to 202.
    edges = bar_edges(dict.fromkeys(range(1, 201), 1), limit=102)
    assert edges.tolist() == [start - 0.5 for start in range(-2, 204, 5)]


def test_one_very_long_text_does_not_widen_the_bars():
    assert bar_edges({10: 99, 10_000: 1}, limit=12).tolist() == [x + 0.5 for x in range(14)]


@pytest.mark.parametrize(
    ("longest", "width"),
    [
        (40, 1),  # the bars end at 40
        (10_000, 9),  # exceeded: the bars end at the limit, 400 / 48 = 8.3
    ],
)
def test_a_distant_limit_is_shown_only_if_exceeded(longest, width):
    edges = bar_edges({40: 99, longest: 1}, limit=400)
    assert edges[1] - edges[0] == width


def test_a_near_limit_is_shown():
    # 147 / 48 is a little over 3; 144 to 147
    assert bar_edges({49: 100}, limit=147)[-2:].tolist() == [143.5, 147.5]
    assert bar_edges({49: 100}, limit=148)[-2:].tolist() == [48.5, 50.5]  # 49 / 48
    assert drawn({49: 100}, limit=147).get_xlim() == (0, 147.5)


def drawn(counts, limit):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw(axes, "prompt", counts, limit)
    return axes


def test_over_long_texts_have_another_color():
    axes = drawn({10_000: 1, 12: 100, 10: 99}, limit=12)
    bars = [
        (bar.get_x(), bar.get_width(), bar.get_height(), bar.get_hatch())
        for bar in axes.patches
        if bar.get_height()
    ]
    assert bars == [(9.5, 1, 99, None), (11.5, 1, 100, None), (12.5, 1, 1, "////")]
    colors = [bar.get_facecolor() for bar in axes.patches if bar.get_height()]
    assert colors[0] == colors[1] != colors[2]
    assert [line.get_xdata()[0] for line in axes.lines] == [12.5]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "within the limit (12)",
        "over 12: 1 (0.5%)",
    ]
    assert axes.get_title(loc="left") == "Prompts (200)"
    assert axes.get_xlabel() == "length in tokens (hatched: 13 to 10,000)"
    assert axes.get_ylabel() == "number of prompts"
    assert axes.get_xlim() == (0, 13.5)


def test_without_over_long_texts_the_legend_omits_them():
    axes = drawn({10: 99, 11: 1}, limit=100)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["within the limit (100)"]
    assert list(axes.lines) == []
    assert axes.get_xlabel() == "length in tokens"


def test_without_texts_the_panel_is_empty():
    axes = drawn({}, limit=100)
    assert axes.get_title(loc="left") == "Prompts (0)"
    assert list(axes.patches) == []
