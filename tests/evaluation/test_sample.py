"""The program on one rank, with a tiny model: which answers become rows."""

import json

import pyarrow as pa
import pytest
import torch
from chat_server import chat_server, longer
from rank_fixtures import as_artifact, write_table
from strict_device import StrictDevice

from rlhf_pipeline.config.sample import SampleConfig, TableConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.evaluation import sample
from rlhf_pipeline.evaluation.sample import choose, knock_out
from rlhf_pipeline.models.loading import load_tokenizer
from rlhf_pipeline.runtime.job import LaunchedJob, as_json
from rlhf_pipeline.training.preferences import pairs

WHOLE = [True, True, True]


@pytest.mark.parametrize(
    ("scores", "ended", "changes", "best", "pair"),
    [
        ([1.0, 3.0, 2.0], WHOLE, {}, (1,), (1, 0)),
        ([2.0, 2.0, 1.0], WHOLE, {}, (0,), (0, 2)),  # of equal scores the first
        ([2.0, 1.0, 1.0], WHOLE, {}, (0,), (0, 1)),
        ([2.0, 2.0, 2.0], WHOLE, {}, (0,), None),  # ties are no comparison
        ([1.0, 3.0, 2.0], [True, False, True], {}, (2,), (2, 0)),  # cut: neither best
        ([1.0, 3.0, 2.0], [False, True, True], {}, (1,), (1, 2)),  # nor worst
        ([1.0, 3.0, 2.0], [False, True, False], {}, (1,), None),
        ([1.0, 3.0, 2.0], [False, False, False], {}, None, None),
        ([1.0, 3.0, 2.0], [False, False, False], {"cut_answers": "keep"}, (1,), (1, 0)),
        ([0.0, 1.0, 0.0], WHOLE, {"min_score": 1.0}, (1,), (1, 0)),
        ([0.0, 0.5, 0.0], WHOLE, {"min_score": 1.0}, None, None),
    ],
)
def test_the_best_and_the_worst_answer_are_chosen(scores, ended, changes, best, pair):
    config = SampleConfig(n=3, **changes)
    assert choose(scores, ended, "demonstrations", config) == best
    assert choose(scores, ended, "comparisons", config) == pair


@pytest.fixture(scope="module")
def inputs(make_model, tmp_path_factory):
    policy, folder = make_model("llama", seed=1), tmp_path_factory.mktemp("prompts")
    tokenizer = load_tokenizer(policy)
    messages = [[{"role": "user", "content": f"what is {n}?"}] for n in range(6)]
    ids = [
        tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False)
        for m in messages
    ]
    columns = {"id": [str(n) for n in range(6)], "prompt_ids": ids, "messages": messages}
    table = pa.table(columns | {"source": ["files"] * 6, "reference": ["x"] * 6})
    write_table(table, folder, TokenContract.read(policy))
    return {"prompts": folder, "policy": as_artifact(policy)}


def run(inputs, folder, number=1, **changes):
    given = {"n": 3, "cut_answers": "keep", "sampling": {"max_response_tokens": 6}}
    config = SampleConfig(**given | changes)
    table = TableConfig(kind="comparisons", round=number, rewards=config.rewards)
    blocks = as_json({"iterative_dpo.sample": config, "table": table})
    folder.mkdir(parents=True)
    with StrictDevice():
        sample.main(LaunchedJob("sample", "f", 1, blocks, inputs, {}, folder, 60.0))
    lines = [json.loads(line) for line in (folder / "export" / "samples.jsonl").open()]
    with pa.ipc.open_stream(folder / "export" / "train.arrow") as stream:
        return lines, stream.read_all().to_pylist()


WORLD = """
class World:
    def __init__(self, seed):
        self.first, self.turns = seed % 2, 2

    def reset(self, task):
        return [{"role": "user", "content": task["reference"] * (1 + self.first)}]

    def step(self, answer):
        self.turns -= 1
        return [{"role": "user", "content": "on"}], float(len(answer)), self.turns == 0
"""


def test_rows_of_episodes_learn_the_tokens_of_the_policy_alone(inputs, world, tmp_path):
    """And no comparison has two prompts, although the environment draws them."""
    file = tmp_path / "world.py"
    file.write_text(WORLD)
    lines, rows = run(
        inputs | {"code.environment": file}, tmp_path / "w" / "s" / "f", n=4,
        environment=f"{file}:World", rewards=[{"environment": "reward"}], generator="ends:Ends",
        max_turn_tokens=4, max_prompt_tokens=40, sampling={"max_response_tokens": 60},
    )  # fmt: skip
    tokenizer = load_tokenizer(inputs["policy"])
    chosen = [line["id"] for line in lines if line["chosen"] and line["part"] == "train"]
    assert rows and [row["id"] for row in rows] == chosen
    for row in rows:
        prompt = tokenizer.decode(row["prompt_ids"])
        assert prompt in ("\n\nHuman: x\n\nAssistant:", "\n\nHuman: xx\n\nAssistant:")
        for answer in "chosen", "rejected":
            ids, mask = row[f"{answer}_ids"], row[f"{answer}_mask"]
            given = [token for token, own in zip(ids, mask, strict=True) if not own]
            assert tokenizer.decode(given) == "\n\nHuman: on\n\nAssistant:"
            assert tokenizer.decode(ids).count("<|end|>") == 2
    batch = pairs({name: [row[name] for row in rows] for name in rows[0]}, 0).answers
    masks = [row[f"{answer}_mask"] for row in rows for answer in ("chosen", "rejected")]
    assert batch.action_mask.sum(1).tolist() == [sum(mask) for mask in masks]
    assert (batch.real_mask.sum(1) > batch.action_mask.sum(1)).all()


@pytest.fixture
def rewarded(inputs, tmp_path):
    """Makes a function of the text `r`: the inputs with it as a number of the list, its place."""

    def rewarded(value, number=0):
        file = tmp_path / "my.py"
        file.write_text(f"def a(prompts, responses): return [{value} for r in responses]")
        return inputs | {f"judges.{number}": file}, f"{file}:a"

    return rewarded


def test_a_chat_model_and_a_function_choose_the_pairs(rewarded, world, tmp_path):
    inputs, place = rewarded("r.count('a')", number=1)
    with chat_server(longer) as (url, requests):
        judge = {"openai": {"base_url": url, "model": "judge"}}
        rewards = [judge, {"callable": place, "weight": -0.5}]
        lines, rows = run(inputs, tmp_path / "w" / "s" / "f", prompts=4, validation_prompts=2,
                          rewards=rewards)  # fmt: skip
    assert [line["part"] for line in lines] == ["train"] * 4 + ["validation"] * 2
    assert len(requests) > 0
    for line in lines:
        lengths = [len(one) for one in line["responses"]]

        def won(a, b, lengths=lengths):
            return (lengths[a] > lengths[b]) - (lengths[a] < lengths[b])

        # Three answers make three pairs: 0 and 1, then 2 and the winner, 2 and the loser.
        wins = [won(0, 1) + won(0, 2), won(1, 2) + won(1, 0), won(2, 0) + won(2, 1)]
        expected = [w - 0.5 * r.count("a") for w, r in zip(wins, line["responses"], strict=True)]
        assert line["scores"] == expected
    tokenizer = load_tokenizer(inputs["policy"])
    paired = [one for one in lines[:4] if one["chosen"]]
    for line, row in zip(paired, rows, strict=True):
        assert row["id"] == line["id"]
        texts = [
            tokenizer.decode(row[name], skip_special_tokens=True).strip()
            for name in ("chosen_ids", "rejected_ids")
        ]
        assert texts == [line["responses"][number] for number in line["chosen"]]


def test_answers_that_were_cut_are_not_compared(inputs, world, tmp_path):
    """The tiny model ends no answer by itself."""
    with chat_server(longer) as (url, requests):
        rewards = [{"openai": {"base_url": url, "model": "judge"}}]
        with pytest.raises(StageError, match="found 0 rows for train"):
            run(inputs, tmp_path / "w" / "s" / "f", rewards=rewards, cut_answers="drop")
    assert not requests


def test_a_round_has_other_prompts_until_all_are_used_and_other_answers(rewarded, world, tmp_path):
    inputs, place = rewarded("len(r)")
    given = {"prompts": 2, "validation_prompts": 1, "rewards": [place]}
    of_rounds = [run(inputs, tmp_path / str(n), n, **given)[0] for n in (1, 2, 3)]
    prompts = [line["id"] for lines in of_rounds for line in lines[:-1]]
    assert sorted(prompts) == ["0", "1", "2", "3", "4", "5"]
    held_out = [lines[-1] for lines in of_rounds]
    assert held_out[0]["messages"] == held_out[1]["messages"]
    assert held_out[0]["responses"] != held_out[1]["responses"]


@pytest.mark.parametrize(
    ("least", "reason"),
    [
        (0.0, "cut. Fix: .*, or use rewards that tell answers apart"),
        (1.0, "no answer reached min_score 1: the best one has 0. Fix: .*, or lower min_score"),
    ],
)
def test_no_pair_at_all_is_refused(rewarded, world, tmp_path, least, reason):
    inputs, place = rewarded("0.0")
    with pytest.raises(StageError, match=f"^sample: found 0 rows for train, .* 1, .*{reason}$"):
        run(inputs, tmp_path / "f", rewards=[place], min_score=least)


def test_messages_name_the_reward_of_the_sample(inputs, world, tmp_path):
    """The trained reward model, which is no judge of the list, has a number, too."""
    with chat_server(lambda *_: "Hm.") as (url, _):
        chat = {"openai": {"base_url": url, "model": "m"}}
        rewards = [{"reference": "exact"}, chat | {"rubric": "Short."}]
        with pytest.raises(StageError, match=r"^iterative_dpo\.sample\.rewards\.1: found .* of m "):
            run(inputs, tmp_path / "w" / "s" / "f", rewards=rewards)


# --- the best and the worst of a field, by a judge of pairs ---------------------------------------


def played(quality, decide):
    """Points (fields, players), and the matches of each round. Players have numbers in order."""
    rounds, width = [], len(quality[0])

    def recorded(matches):
        rounds.append(list(matches))
        return decide(matches)

    fields = [range(row * width, (row + 1) * width) for row in range(len(quality))]
    points = knock_out(fields, recorded)
    return [[points[player] for player in field] for field in fields], rounds


def test_a_perfect_judge_finds_both_ends_of_a_field_of_any_size_in_few_comparisons():
    """A field of one plays no match; all fields play a round together."""
    draw = torch.Generator().manual_seed(0)
    for size in range(1, 18):
        quality = [torch.randperm(size, generator=draw).tolist() for _ in range(50)]
        flat = [player for field in quality for player in field]
        points, rounds = played(
            quality, lambda matches, q=flat: [1.0 if q[a] > q[b] else -1.0 for a, b in matches]
        )
        for own, won in zip(quality, points, strict=True):
            assert own[won.index(max(won))] == size - 1
            assert own[won.index(min(won))] == 0
            assert sum(won) == 0
        assert sum(map(len, rounds)) / 50 == max((3 * size + 1) // 2 - 2, 0)
        assert len(rounds) == (size - 1).bit_length()


def test_after_a_draw_the_player_with_more_points_goes_on():
    """2 beats 3, and all other matches are draws: so 2 goes on after 0 and 2, and after 1 and 3, of
    which 3 has lost, 3 stays for the worst place."""

    points, rounds = played([[0] * 8], lambda matches: [float(m == (2, 3)) for m in matches])
    assert points == [[0.0, 0.0, 1.0, -1.0, 0.0, 0.0, 0.0, 0.0]]
    assert rounds[-1] == [(2, 4), (3, 7)]
