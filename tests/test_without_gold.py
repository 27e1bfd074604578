"""What the benchmark without a gold score gives the runs, and what it says of their decisions."""

import json

import pytest

from rlhf_pipeline.data.sources.synthetic import asked, measured


@pytest.fixture
def without_gold(benchmark):
    return benchmark("without_gold")


def test_careful_comparisons_prefer_the_better_answer_most_often(without_gold):
    rows = list(without_gold.careful(seed=3))
    gains = [
        measured(asked(row["prompt"]), row["chosen"]).gold
        - measured(asked(row["prompt"]), row["rejected"]).gold
        for row in rows
    ]
    assert len(rows) == 300 and sum(gain > 0 for gain in gains) > 220


@pytest.mark.parametrize(
    ("world", "names"),
    [("good", ["comparisons", "test"]), ("hasty", ["demonstrations", "hasty", "test"])],
)
def test_no_source_of_a_world_has_a_gold_score(without_gold, world, names, tmp_path, monkeypatch):
    row = {"prompt": "p", "chosen": "c", "rejected": "r"}
    monkeypatch.setattr(without_gold, "generated", lambda source, seed: [row])
    without_gold.write_files(world, 1, tmp_path / "world")
    given = without_gold.sources(world, tmp_path / "world")
    assert {source["name"] for source in given} == {"files"}
    assert [source["path"] for source in given] == [
        str(tmp_path / f"world/{name}.jsonl") for name in names
    ]
    assert json.loads((tmp_path / "world/test.jsonl").read_text()) == row


def test_the_tables_set_each_decision_beside_the_truth(without_gold):
    better = {"promoted": True, "failed": [], "true": [0.7, 0.65, 0.75]}
    worse = {"promoted": False, "failed": ["length"], "true": [0.5, 0.45, 0.55]}
    judges = list(without_gold.JUDGES)
    found = {
        ("good", 1): dict.fromkeys(judges, better),
        ("good", 2): dict.fromkeys(judges, worse),
        ("hasty", 1): dict.fromkeys(judges, worse | {"failed": ["length", "gain"]}),
    }
    columns = without_gold.summary(found).columns
    rows = list(zip(*(column.cells for column in columns), strict=True))
    assert rows[0] == ("good", judges[0], "1 of 2", "1 of 2", "length")
    assert rows[3] == ("hasty", judges[0], "0 of 1", "0 of 1", "")
    columns = without_gold.decisions(found).columns
    cells = [next(iter(column.cells)) for column in columns]
    assert cells[:3] == ["good 1", "0.700 [0.650, 0.750]", "yes"]
    assert list(columns[2].cells)[2] == "no: length; gain"
