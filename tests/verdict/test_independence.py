"""Which judges training has optimized, by the lineage of both policies."""

import pytest

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import Manifest, file_digest
from rlhf_pipeline.verdict.independence import own_rewards, standings

RUBRIC = {"rubric": "Short.", "openai": {"base_url": "http://here/v1", "model": "m"}}


@pytest.mark.parametrize(
    ("rewards", "optimized", "names"),
    [
        ([{"weight": 1.0, "model": "trained"}], {"score", "same_as_trained"}, ["trained"]),
        (None, {"score", "same_as_trained"}, []),
        ([{"weight": 0.5, "model": "trained"}], {"score", "same_as_trained"}, ["0.5 * trained"]),
        ([{"weight": 1.0, "path": "x"}], {"other"}, ["x"]),
        ([{"weight": -2.0, "path": "x"}], {"other"}, ["-2 * x"]),
        ([{"weight": 0.0, "path": "x"}], set(), []),
        ([{"weight": 1.0, "callable": "my.py:f"}], {"f"}, ["f"]),
        ([{"weight": 1.0, "callable": "my.py:g"}], set(), ["g"]),
        ([{"weight": 1.0, "callable": "my.py:reads"}], {"exact"}, ["reads"]),
        ([{"weight": 1.0, "reference": "contains"}], {"exact"}, ["contains"]),
        ([{"openai": {"base_url": "http://there/v1", "model": "m"}}], {"m"}, ["m"]),
        ([RUBRIC], {"rubric"}, ["m"]),
        ([RUBRIC | {"rubric": "Long."}], set(), ["m"]),
        ([RUBRIC | {"rubric": "As {reference}."}], {"exact"}, ["m"]),
        ([{"regex": "^Yes"}], {"regex"}, ["regex"]),
        ([{"regex": "^No"}], set(), ["regex"]),
        ([{"weight": 1.0, "callable": "gone.py:f"}], {"f", "exact"}, ["f"]),  # nobody can know
    ],
)
def test_judges_that_training_has_optimized(tmp_path, monkeypatch, rewards, optimized, names):
    """Reward models count by their bytes, functions by file and name; DPO has no rewards.

    A judge by true answers counts if a reward function reads true answers.
    """
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "my.py"
    source.write_text(
        "def f(prompts, responses): ...\n"
        "def g(prompts, responses): ...\n"
        "def reads(prompts, responses, references): ...\n"
    )
    policy = tmp_path / "policy"
    policy.mkdir()
    is_function = rewards is not None and "callable" in rewards[0]
    reward = file_digest(source) if is_function else "bytes of other"
    inputs = {"rewards.0": reward, "reward_model": "bytes of trained"}
    inputs = {"comparisons": "of both"} if rewards is None else inputs
    (tmp_path / "rm").mkdir()
    trained = {"comparisons": "of both"}
    Manifest("reward_model", "f", 0, {}, trained, {}, {}, {}).write(tmp_path / "rm")
    config = {"dpo": {}} if rewards is None else {"ppo": {"rewards": rewards}}
    manifest = Manifest("ppo", "f", 0, config, inputs, {}, {}, {})
    manifest.write(policy)
    config = EvaluateConfig(
        judges=[
            f"{source}:f",
            {"model": "./a", "name": "other"},
            {"model": "./b", "name": "same_as_trained"},
            {"reference": "exact"},
            {"openai": {"base_url": "http://here/v1", "model": "m"}},
            RUBRIC | {"name": "rubric"},
            {"regex": "^Yes"},
        ]
    )
    job = LaunchedJob(
        "evaluate", "f", 0, {},
        {"ppo_model": policy, "judges.0": source, "reward_model": tmp_path / "rm"},
        {
            "reward_model": "bytes of trained",
            "judges.0": file_digest(source),
            "judges.1": "bytes of other",
            "judges.2": "bytes of trained",
        },
        tmp_path, 60.0,
    )  # fmt: skip
    found = standings(job, {"ppo": policy}, config)
    assert {name for name, one in found.items() if one.state == "optimized"} == optimized
    assert own_rewards(policy) == names


BASE = {"base_model": {"path": "/models/x"}}
PPO = {"ppo": {"rewards": [{"model": "trained", "weight": 1.0}]}}


class Lineages:
    """Manifests of artifacts that were made from each other."""

    def __init__(self, folder):
        self.folder, self.made = folder, {}

    def make(self, name, stage, config, inputs=(), comparisons=None, **given):
        """An artifact of a stage; `inputs` are names of others, `given` further digests, and
        `comparisons` a part of a split."""
        digests = dict(given) | {as_input: f"digest of {other}" for as_input, other in inputs}
        ancestors = {}
        for _, other in inputs:
            ancestors |= self.made[other].ancestors
            ancestors[f"digest of {other}"] = self.made[other].origin
        if comparisons is not None:
            part, _, split = comparisons.partition(" of ")
            digests["comparisons"] = part
            ancestors[part] = self.made[split].origin
        self.made[name] = Manifest(stage, name, 0, config, digests, {}, {}, {}, ancestors=ancestors)
        (self.folder / name).mkdir()
        self.made[name].write(self.folder / name)
        return self.folder / name

    def standing(self, baseline, candidate, reward_model="rm", **judges):
        inputs = {"reward_model": reward_model} | {f"{name}.0": one for name, one in judges.items()}
        job = LaunchedJob(
            "evaluate", "f", 0, {}, {name: self.folder / one for name, one in inputs.items()},
            {name: f"digest of {one}" for name, one in inputs.items()}, self.folder, 60.0,
        )  # fmt: skip
        policies = {name: self.folder / name for name in (baseline, candidate)}
        found = standings(job, policies, EvaluateConfig())
        assert found.pop("gold").state == "independent"
        return {name: (one.state, one.by) for name, one in found.items()}


@pytest.fixture
def made(tmp_path):
    """SFT, a reward model, PPO with it, and a second reward model from rows held back."""
    made = Lineages(tmp_path)
    made.make("base", "base_model", BASE, bytes="of x")
    made.make("split", "split", {"split": {}}, [("base_model", "base")], source_0="rows")
    made.make("earlier", "split", {"split": {"held_back": 0}}, [("base_model", "base")],
              source_0="rows")  # fmt: skip
    made.make("sft", "sft", {"sft": {}}, [("base_model", "base"), ("demonstrations", "earlier")])
    rows, trained, sft = [("prompts", "split")], {"reward_model": {}}, [("sft_model", "sft")]
    made.make("rm", "reward_model", trained, sft, comparisons="first of split")
    made.make("rm2", "judge_model", trained, sft, comparisons="second of split")
    made.make("ppo", "ppo", PPO, [("sft_model", "sft"), ("reward_model", "rm"), *rows])
    return made


def test_a_model_from_rows_that_were_held_back_is_independent(made):
    """SFT was reused from a run that held nothing back."""
    assert made.standing("sft", "ppo", judge_model="rm2") == {
        "score": ("optimized", {"ppo": "rewards"}),
        "judge_model": ("independent", {}),
    }


def test_a_reward_model_of_an_ancestor_is_not_independent(made):
    """GRPO goes on from PPO; its own reward is a function."""
    rewards = {"grpo": {"rewards": [{"callable": "my.py:f", "weight": 1.0}]}}
    made.make("grpo", "grpo", rewards, [("sft_model", "ppo")])
    assert made.standing("sft", "grpo")["score"] == ("optimized", {"grpo": "earlier"})


def test_functions_that_chose_own_answers_count_by_their_content(tmp_path):
    """`sample` calls them judges: one that reads no true answer does not optimize those who do."""
    source = tmp_path / "my.py"
    source.write_text("def short(prompts, responses): ...")
    made, rewards = Lineages(tmp_path), [{"callable": f"{source}:short", "weight": 1.0}]
    made.make("sft", "sft", {"sft": {}})
    sampled = {"rejection.sample": {"rewards": rewards}}
    given = {"judges.0": file_digest(source)}
    made.make("rows", "sample", sampled, [("policy", "sft")], **given)
    made.make("rejection", "rejection", {"rejection": {}, "table": {"rewards": rewards}},
              [("base_model", "sft"), ("demonstrations", "rows")],
              **{"rewards.0": file_digest(source)})  # fmt: skip
    config = EvaluateConfig(judges=[{"reference": "exact"}, f"{source}:short"])
    job = LaunchedJob("evaluate", "f", 0, {}, {"judges.1": source},
                      {"judges.1": file_digest(source)}, tmp_path, 60.0)  # fmt: skip
    policies = {name: tmp_path / name for name in ("sft", "rejection")}
    found = {name: one.state for name, one in standings(job, policies, config).items()}
    assert found == {"gold": "independent", "exact": "independent", "short": "optimized"}


def test_a_function_that_was_edited_since_is_the_same_judge(tmp_path):
    """Its place counts as well as its content."""
    source = tmp_path / "my.py"
    source.write_text("def f(prompts, responses): ...")
    rewards = {"ppo": {"rewards": [{"weight": 1.0, "callable": f"{source}:f"}]}}
    policy = Lineages(tmp_path).make("ppo", "ppo", rewards, **{"rewards.0": "an earlier content"})
    job = LaunchedJob("evaluate", "f", 0, {}, {"judges.0": source}, {}, tmp_path, 60.0)
    found = standings(job, {"ppo": policy}, EvaluateConfig(judges=[f"{source}:f"]))
    assert found["f"].by == {"ppo": "rewards"}


@pytest.mark.parametrize(("reward", "state"), [("path", "unknown"), ("regex", "independent")])
def test_a_judge_on_the_hub_may_be_the_download_that_was_a_reward(tmp_path, reward, state):
    made = Lineages(tmp_path)
    made.make("sft", "sft", {"sft": {}})
    rewards = {"ppo": {"rewards": [{reward: "some/folder", "weight": 1.0}]}}
    made.make("ppo", "ppo", rewards, [("sft_model", "sft")], **{"rewards.0": "its bytes"})
    config = EvaluateConfig(judges=[{"path": "owner/model", "name": "hub"}])
    job = LaunchedJob("evaluate", "f", 0, {}, {}, {"judges.0": "a commit"}, tmp_path, 60.0)
    policies = {name: tmp_path / name for name in ("sft", "ppo")}
    assert standings(job, policies, config)["hub"].state == state


def test_the_training_of_the_baseline_counts(made):
    assert made.standing("ppo", "sft")["score"] == ("optimized", {"ppo": "rewards"})


def test_a_student_inherits_from_its_teacher(made):
    made.make("student", "distill", {"distill": {}}, [("sft_model", "sft"), ("teacher", "ppo")])
    assert made.standing("sft", "student")["score"] == ("optimized", {"student": "earlier"})


def test_a_reward_model_without_effect_on_a_policy_is_independent(made):
    """It is an input of PPO and GRPO, whatever their rewards are."""
    inputs = [("sft_model", "sft"), ("reward_model", "rm")]
    trained = {"model": "trained", "weight": 0.0}
    for name, rewards in (("own", []), ("silent", [trained])):
        rewards = {"grpo": {"rewards": [{"callable": "my.py:f", "weight": 1.0}, *rewards]}}
        made.make(name, "grpo", rewards, inputs)
        assert made.standing("sft", name)["score"] == ("independent", {})


def test_a_policy_that_trains_on_its_own_answers_was_rewarded_where_it_has_drawn_them(made):
    """The stage `sample` reads the reward model; the policy has only the table of the answers."""
    trained = [{"model": "trained", "weight": 1.0}]
    own = {"rejection": {"rewards": trained}, "table": {"rewards": trained}}
    made.make("drawn", "sample", own, [("policy", "sft"), ("reward_model", "rm")])
    inputs = [("base_model", "sft"), ("demonstrations", "drawn")]
    made.make("best", "rejection", {"rejection": {}, "table": {"rewards": trained}}, inputs)
    assert made.standing("sft", "best")["score"] == ("optimized", {"best": "rewards"})


def test_another_model_of_the_same_comparisons_is_not_independent(made):
    """Two reward models that learned from one table share its mistakes, and so does DPO."""
    sft, first = [("sft_model", "sft")], {"comparisons": "first of split"}
    made.make("again", "reward_model", {"reward_model": {"epochs": 2}}, sft, **first)
    made.make("dpo", "dpo", {"dpo": {}}, sft, **first)
    assert made.standing("sft", "ppo", "again")["score"] == ("optimized", {"ppo": "earlier"})
    assert made.standing("sft", "dpo", "rm")["score"] == ("optimized", {"dpo": "comparisons"})
    assert made.standing("sft", "dpo", "rm2")["score"] == ("independent", {})


def test_a_model_from_another_split_of_the_same_source_may_have_seen_the_same_rows(made):
    made.make("other", "split", {"split": {"seed": 2}}, [("base_model", "base")], source_0="rows")
    third = {"comparisons": "third of other"}
    made.make("rm3", "reward_model", {"reward_model": {}}, [("sft_model", "sft")], **third)
    assert made.standing("sft", "ppo", "rm3")["score"] == ("unknown", {"ppo": "unknown"})
    grpo = {"grpo": {"rewards": [{"reference": "exact", "weight": 1.0}]}}
    made.make("grpo", "grpo", grpo, [("sft_model", "sft"), ("split", "split")])
    assert made.standing("sft", "grpo", "rm3")["score"] == ("independent", {})


def test_a_model_that_was_trained_elsewhere_is_unknown_unless_both_come_from_it(made):
    made.make("foreign", "base_model", BASE, bytes="of y")
    both = {"sft": "unknown", "foreign": "unknown"}
    assert made.standing("sft", "foreign")["score"] == ("unknown", both)
    assert made.standing("base", "sft", "rm2")["score"] == ("independent", {})
    # The optimized judge stays optimized, whatever else is unknown.
    assert made.standing("foreign", "ppo")["score"] == ("optimized", {"ppo": "rewards"})


def test_a_model_of_an_earlier_version_has_no_lineage(made):
    made.make("old", "ppo", {"ppo": {"rewards": []}}, sft_model="digest of something")
    assert made.standing("sft", "old")["score"] == ("unknown", {"old": "unknown", "sft": "unknown"})


def test_the_start_of_a_reward_model_is_no_training_for_a_judge(made):
    """Its head is new. A teacher from elsewhere is another matter: nobody knows its training."""
    own = {"base_model": {"path": "/models/small"}}
    made.make("small", "reward_base", own, bytes="of small")
    made.make("rm3", "reward_model", {"reward_model": {}}, [("base_model", "small")],
              comparisons="first of split")  # fmt: skip
    made.make("ppo3", "ppo", PPO, [("sft_model", "sft"), ("reward_model", "rm3")])
    assert made.standing("sft", "ppo3", reward_model="rm3", judge_model="rm2") == {
        "score": ("optimized", {"ppo3": "rewards"}),
        "judge_model": ("independent", {}),
    }


def test_comparisons_in_the_tokens_of_the_reward_model_are_the_same_ones(made):
    """DPO learned from them in its own tokens."""
    made.make("dpo", "dpo", {"dpo": {}}, [("sft_model", "sft")], comparisons="first of split")
    made.make("rm4", "reward_model", {"reward_model": {}}, comparisons="others of split",
              comparisons_of_policy="first")  # fmt: skip
    assert made.standing("sft", "dpo", reward_model="rm4") == {
        "score": ("optimized", {"dpo": "comparisons"})
    }
