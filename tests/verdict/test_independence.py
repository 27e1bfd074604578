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
    """Artifacts of stages from one base model and one source, unless a comment says otherwise."""
    made, base, sft = Lineages(tmp_path), ("base_model", "base"), ("sft_model", "sft")
    made.make("base", "base_model", BASE, bytes="of x")
    made.make("foreign", "base_model", BASE, bytes="of y")
    made.make("split", "split", {"split": {}}, [base], source_0="rows")
    made.make("earlier", "split", {"split": {"held_back": 0}}, [base], source_0="rows")
    made.make("other", "split", {"split": {"seed": 2}}, [base], source_0="rows")
    made.make("sft", "sft", {"sft": {}}, [base, ("demonstrations", "earlier")])
    # Reward models. The start of `rm3` has a new head; `rm4` learned from `first` in other tokens.
    trained, again = {"reward_model": {}}, {"reward_model": {"epochs": 2}}
    made.make("small", "reward_base", {"base_model": {"path": "/models/small"}}, bytes="of small")
    first, second, third = ("first of split", "second of split", "third of other")
    made.make("rm", "reward_model", trained, [sft], first)
    made.make("rm again", "reward_model", again, [sft], first)
    made.make("rm2", "judge_model", trained, [sft], second)
    made.make("rm3", "reward_model", trained, [("base_model", "small")], first)
    made.make("rm4", "reward_model", trained, (), "others of split", comparisons_of_policy="first")
    made.make("rm5", "reward_model", trained, [sft], third)
    # Policies. PPO and GRPO have a reward model as an input, whatever their rewards are.
    function, exact = {"callable": "my.py:f", "weight": 1.0}, {"reference": "exact", "weight": 1.0}
    silent, score = {"model": "trained", "weight": 0.0}, PPO["ppo"]
    rm, rows = ("reward_model", "rm"), ("prompts", "split")
    made.make("ppo", "ppo", PPO, [sft, rm, rows])
    made.make("ppo3", "ppo", PPO, [sft, ("reward_model", "rm3")])
    made.make("old", "ppo", {"ppo": {"rewards": []}}, sft_model="digest of something")
    made.make("own", "grpo", {"grpo": {"rewards": [function]}}, [sft, rm])
    made.make("silent", "grpo", {"grpo": {"rewards": [function, silent]}}, [sft, rm])
    made.make("from ppo", "grpo", {"grpo": {"rewards": [function]}}, [("sft_model", "ppo")])
    made.make("exact", "grpo", {"grpo": {"rewards": [exact]}}, [sft, ("split", "split")])
    made.make("student", "distill", {"distill": {}}, [sft, ("teacher", "ppo")])
    made.make("dpo", "dpo", {"dpo": {}}, [sft], first)
    made.make("drawn", "sample", {"rejection": score, "table": score}, [("policy", "sft"), rm])
    drawn = [("base_model", "sft"), ("demonstrations", "drawn")]
    made.make("best", "rejection", {"rejection": {}, "table": score}, drawn)
    return made


@pytest.mark.parametrize(("policy", "reward_model"), [("ppo", "rm"), ("ppo3", "rm3")])
def test_a_model_from_rows_that_were_held_back_is_independent(made, policy, reward_model):
    """SFT was reused from a run that held nothing back. The start of `rm3` is no training for a
    judge; a teacher from elsewhere is another matter: nobody knows its training."""
    assert made.standing("sft", policy, reward_model, judge_model="rm2") == {
        "score": ("optimized", {policy: "rewards"}),
        "judge_model": ("independent", {}),
    }


@pytest.mark.parametrize(
    ("baseline", "candidate", "reward_model", "state", "by"),
    [
        ("ppo", "sft", "rm", "optimized", {"ppo": "rewards"}),  # the baseline counts
        ("sft", "from ppo", "rm", "optimized", {"from ppo": "earlier"}),  # and each ancestor
        ("sft", "student", "rm", "optimized", {"student": "earlier"}),  # and a teacher
        # The stage `sample` reads the reward model; the policy has only the table of its answers.
        ("sft", "best", "rm", "optimized", {"best": "rewards"}),
        # A reward model without effect on the policy.
        ("sft", "own", "rm", "independent", {}),
        ("sft", "silent", "rm", "independent", {}),
        # Models that learned from one table share its mistakes, in any tokens.
        ("sft", "ppo", "rm again", "optimized", {"ppo": "earlier"}),
        ("sft", "dpo", "rm", "optimized", {"dpo": "comparisons"}),
        ("sft", "dpo", "rm2", "independent", {}),
        ("sft", "dpo", "rm4", "optimized", {"dpo": "comparisons"}),
        # Another split of the same source may have the same rows.
        ("sft", "ppo", "rm5", "unknown", {"ppo": "unknown"}),
        ("sft", "exact", "rm5", "independent", {}),
        # What was trained elsewhere is unknown, unless both models come from it.
        ("sft", "foreign", "rm", "unknown", {"sft": "unknown", "foreign": "unknown"}),
        ("base", "sft", "rm2", "independent", {}),
        ("foreign", "ppo", "rm", "optimized", {"ppo": "rewards"}),  # whatever else is unknown
        ("sft", "old", "rm", "unknown", {"old": "unknown", "sft": "unknown"}),  # no lineage
    ],
)
def test_a_judge_is_optimized_or_unknown_by_what_two_policies_were_made_from(
    made, baseline, candidate, reward_model, state, by
):
    assert made.standing(baseline, candidate, reward_model) == {"score": (state, by)}


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
