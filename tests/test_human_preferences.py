"""How `benchmarks/human_preferences.py` divides the comparisons, and what its table shows."""

import gzip
import json


def test_dialogues_with_one_first_turn_are_in_one_half(benchmark, tmp_path):
    dialogues = [
        f"\n\nHuman: Question {number}?\n\nAssistant: Answer {answer}."
        for number in range(40)
        for answer in ("a", "b")
    ]
    file = tmp_path / "rows.jsonl.gz"
    with gzip.open(file, "wt") as opened:
        opened.writelines(json.dumps({"chosen": each}) + "\n" for each in dialogues)
    benchmark("human_preferences").write_halves(file, tmp_path / "halves")
    halves = {
        name: (tmp_path / "halves" / f"{name}.jsonl").read_text().splitlines()
        for name in ("judge", "proxy")
    }
    first = {
        name: {json.loads(line)["chosen"].split("\n\nAssistant:")[0] for line in lines}
        for name, lines in halves.items()
    }
    assert first["judge"] and first["proxy"] and not first["judge"] & first["proxy"]
    assert sum(map(len, halves.values())) == len(dialogues)
    assert {len(lines) / len(first[name]) for name, lines in halves.items()} == {2}


def test_the_table_has_the_untouched_model_and_both_judges(benchmark, capsys):
    ends = {"lower": 0.4, "upper": 0.6}
    policy = {"kl": 1.25, "response_tokens": 30.0, "eos_fraction": 0.75}
    evaluation = {
        "policies": {"untouched": policy | {"kl": 0.0}, "dpo": policy},
        "win_rates": {
            "judge": {"rate": 0.51} | ends | {"length_controlled": {"rate": 0.52} | ends},
            "proxy": {"rate": 0.53} | ends | {"length_controlled": None},
        },
    }
    of = {"dpo": evaluation, "ppo": evaluation | {"policies": {"untouched": policy, "ppo": policy}}}
    accuracy = {"accuracy": {"validation/accuracy": 0.62}}
    benchmark("human_preferences").show(
        {"commit": "abc", "parts": {"judge": accuracy, "1": accuracy | of}}
    )
    out = capsys.readouterr().out
    assert "proxy of seed 1: {'validation/accuracy': 0.62}" in out
    lines = [line.split("│")[1:-1] for line in out.splitlines() if "│" in line]
    rows = {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}
    assert rows["untouched"] == ["1", "", "", "", "0.00", "30.0", "75.0%"]
    assert rows["dpo"][1:4] == [
        "0.510 [0.400, 0.600]", "0.520 [0.400, 0.600]", "0.530 [0.400, 0.600]",
    ]  # fmt: skip
    assert rows["ppo"][4:] == ["1.25", "30.0", "75.0%"]
