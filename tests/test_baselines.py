"""What `make baselines` reads from an evaluation, and its lookup table."""

import pytest


@pytest.fixture
def baselines(benchmark):
    return benchmark("baselines")


def policy(gold, kl):
    return {"gold_score": gold, "score": gold / 2, "kl": kl, "response_tokens": 9.0}


def evaluation():
    gold = {"rate": 0.7, "lower": 0.6, "upper": 0.8, "length_controlled": {"rate": 0.65}}
    return {
        "candidate": "ppo",
        "policies": {"sft": policy(1.0, 0.0), "ppo": policy(2.0, 1.5)},
        "win_rates": {"gold": gold, "score": {"rate": 0.9, "lower": 0.8, "upper": 0.95}},
        "best_of_n": [policy(1.0, 0.0) | {"n": 1}, policy(1.5, 0.2) | {"n": 2}],
    }


def test_the_candidate_alone_has_a_win_rate(baselines):
    rows = baselines.rows_of(evaluation())
    assert rows.keys() == {"sft", "ppo", "best_of_2"}
    assert rows["ppo"] == policy(2.0, 1.5) | {
        "rate": 0.7, "lower": 0.6, "upper": 0.8, "length_controlled": 0.65,
    }  # fmt: skip
    assert rows["best_of_2"]["gold_score"] == 1.5 and "rate" not in rows["sft"]


def test_the_tables_show_each_seed_and_temperature(baselines):
    ends = {"rate": 0.7, "lower": 0.6, "upper": 0.8}
    parts = {"gold_core": 0.5, "gold_right_answers": 0.75}
    cool = policy(1.8, None) | parts | {"temperature": 0.0, "ppo": policy(2.9, 1.0) | ends | parts}
    found = {7: {"full": ends | {"promoted": True, "failed": []},
                 "sft": policy(1.0, 0.0), "ppo": policy(2.0, 1.5) | ends,
                 "lookup": {"hits": 0, "requests": 5}, "temperatures": [cool]}}  # fmt: skip
    of_seeds = baselines.of_seeds(found)
    cells = [next(iter(column.cells)) for column in of_seeds.columns]
    interval = "0.700 [0.600, 0.800]"
    assert cells == ["7", interval, "yes", "0 of 5", "0.750", "0.750"]
    columns = baselines.of_parts([found[7]]).columns
    rows = list(zip(*(column.cells for column in columns), strict=True))
    unknown = ("-",) * 6
    assert rows == [
        ("1", "SFT", "1.00", *unknown), ("1", "PPO", "2.00", *unknown),
        ("0", "SFT", "1.80", "0.50", "-", "-", "-", "0.75", "-"),
        ("0", "PPO", "2.90", "0.50", "-", "-", "-", "0.75", "-"),
    ]  # fmt: skip
    columns = baselines.of_temperatures(found).columns
    rows = list(zip(*(column.cells for column in columns), strict=True))
    spread = "0.700 to 0.700", "0.600"
    assert rows == [("1", "1.00", "2.00", *spread), ("0", "1.80", "2.90", *spread)]


def test_the_frontier_is_linear_in_the_root_of_kl_and_ends_at_its_last_point(baselines):
    one = {"sft": policy(1.0, 0.0), "ppo": policy(2.0, 0.25), "dpo": policy(2.0, 9.0)}
    for n, (gold, kl) in {2: (1.5, 0.25), 4: (2.0, 1.0), 8: (2.2, 2.25), 16: (2.5, 4.0)}.items():
        one[f"best_of_{n}"] = policy(gold, kl)
    assert baselines.above_frontier(one, "ppo") == 0.5
    assert baselines.above_frontier(one, "dpo") == -0.5
    one["ppo"]["kl"] = 0.5625  # the square root is halfway between those of best of 2 and of 4
    assert baselines.above_frontier(one, "ppo") == pytest.approx(0.25)


def test_without_a_best_of_n_there_is_no_frontier(baselines):
    found = [{"sft": policy(1.0, 0.0), "grpo": policy(2.0, 1.5)}]
    last = baselines.of_methods(found).columns[-1]
    assert list(last.cells) == ["-", "-"]


def test_a_mean_has_the_interval_of_students_t(baselines):
    assert baselines.shown([1.0, 2.0, 3.0]) == "2.00±2.48"  # 4.303 / sqrt(3)
    assert (baselines.shown([1.0]), baselines.shown([])) == ("1.00", "-")


def test_no_test_request_is_in_the_lookup_table(baselines):
    found = baselines.lookup(1)
    assert found["hits"] == 0 < found["requests"]
    assert found["gold_score"] < -2  # the answers to other requests
