"""Reward sources: the forms in one line and as a block, and their files, which nothing imports."""

import pytest
from ppo_runs import ppo_config
from pydantic import ValidationError

from rlhf_pipeline.config.doors import source_file
from rlhf_pipeline.config.rewards import (
    CallableReward,
    ChatConfig,
    CodeReward,
    ModelReward,
    RegexReward,
    RubricReward,
    TrainedReward,
    reads_references,
)
from rlhf_pipeline.kedro_run.faults import judge_faults

CHAT = {"base_url": "http://here/v1", "model": "org/judge-1"}
EXTRA = "Extra inputs are not permitted"


def test_each_form():
    assert ppo_config().rewards == (TrainedReward(weight=1.0),)
    model = {"path": "/models/other", "retokenize": True}
    forms = {
        "trained": ("trained", TrainedReward()),
        "f": ("my.py:f", CallableReward(callable="my.py:f")),
        "g": ("package.module:g", CallableReward(callable="package.module:g")),
        "again": ({"model": "trained", "name": "again"}, TrainedReward(name="again")),
        "h": ({"callable": "my.py:h", "weight": -0.5},
              CallableReward(callable="my.py:h", weight=-0.5)),
        "other": (model, ModelReward(**model)),
        "regex": ({"regex": "^Yes"}, RegexReward(regex="^Yes")),
        "judge-1": ({"rubric": "Short.", "openai": CHAT, "scale": 5},
                    RubricReward(rubric="Short.", openai=ChatConfig(**CHAT), scale=5.0)),
        "code": ({"code": "python", "timeout_s": 2}, CodeReward(code="python", timeout_s=2.0)),
    }  # fmt: skip
    config = ppo_config(rewards=[given for given, _ in forms.values()])
    for (label, (_, reward)), found in zip(forms.items(), config.rewards, strict=True):
        assert (found, found.label) == (reward, label)
    # The round trip through job.json.
    assert type(config).model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("rewards", "place", "message"),
    [
        ([], (), "found no reward source, expected at least one. Fix: add one, or remove rewards"),
        (["foo"], (0,), "expected 'trained', 'FILE.py:FUNCTION', "),
        ([{"weight": 2.0}], (0,), "or a block with one of model, callable, path, reference, reg"),
        ([{"model": "trained", "path": "/x"}], (0, "model", "path"), EXTRA),
        ([{"callable": "my.py"}], (0, "callable", "callable"),
         "expected FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION"),
        ([{"callable": "my.py:f", "retokenize": True}], (0, "callable", "retokenize"), EXTRA),
        ([{"callable": "my.py:f", "timeout_s": 5}], (0, "callable"),
         "timeout_s: found 5, which needs processes of its own. Fix: set processes to 1 or more"),
        ([{"regex": "yes|(no"}], (0, "regex"),
         "found 'yes|(no', expected a regular expression: missing ) at position 7"),
        ([{"openai": CHAT}], (0,), "beside openai, add a rubric"),
        ([{"rubric": "Short."}], (0, "rubric", "openai"), "Field required"),
        ([{"rubric": "Short.", "openai": CHAT | {"template": "{prompt} {first} {second}"}}],
         (0, "rubric"), "openai.template: found a text, expected none: the rubric is the question"),
        (["a/my.py:f", "b/my.py:f"], (),
         "found two called 'my.f', expected unique names. Fix: set the name of one of them"),
        *(([{"rubric": "Short.", "openai": CHAT | {"request": request}}], (0, "rubric", "openai"),
           f"request.{name}: found a field for a secret, expected none: parameters are "
           "recorded. Fix: set openai.api_key_env to the name of an environment variable with the")
          for name, request in [
              ("api_key", {"api_key": "sk-canary"}),
              ("extra_headers.Authorization", {"extra_headers": {"Authorization": "canary"}}),
              ("x.X-Api-Key", {"x": {"X-Api-Key": "canary"}}),
              ("api_keys.0", {"api_keys": ["sk-canary"]}),
              ("x.0.api_key", {"x": [{"api_key": "sk-canary"}]})]),
        ([{"path": "/models/a b"}], (), "found label 'a b', expected letters, digits, "),
    ],
)  # fmt: skip
def test_other_forms_are_refused(rewards, place, message):
    with pytest.raises(ValidationError) as refusal:
        ppo_config(rewards=rewards)
    (fault,) = refusal.value.errors()
    assert fault["loc"] == ("rewards", *place)
    assert message in fault["msg"]


@pytest.mark.parametrize(
    "request_fields",
    [
        {"response_format": {"json_schema": {"schema": {"properties": {"key": {"type": "string"}},
                                                        "required": ["key"]}}}},
        {"chat_template_kwargs": {"bos_token": "<s>"}, "stop_tokens": ["</s>"]},
        {"logprobs": True, "return_token": True, "token": None, "prompt_cache_key": "judge"},
    ],
)  # fmt: skip
def test_a_field_of_a_request_without_a_secret_passes(request_fields):
    assert ChatConfig(**CHAT, request=request_fields).request == request_fields


def test_the_processes_of_a_function_are_no_part_of_the_recipe():
    isolated = CallableReward(callable="my.py:f", processes=2, timeout_s=9)
    assert isolated.recipe() == CallableReward(callable="my.py:f").recipe()
    limits = CodeReward(code="python", processes=9)
    assert limits.recipe() == CodeReward(code="python").recipe()
    assert limits.recipe() != CodeReward(code="python", timeout_s=9).recipe()


SCORES = """
raise SystemExit  # nothing is executed
def exact(prompts, responses, references): ...
def brief(prompts, responses): ...
again = exact
class Call:
    def __call__(self, prompts, /, responses, references): ...
call = Call()
"""
ONE_LABEL = '{"id2label": {"0": "a"}}'


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("def reward(prompts, responses, references): ...", True),
        ("def reward(prompts, responses, reference=None): ...", False),
        # The last definition counts.
        ("def reward(references): ...\ndef reward(prompts, responses): ...", False),
        ("def reward(prompts, responses):\n    def inner(references): ...", False),
        ("def exact(prompts, responses, references): ...\nreward: object = exact", True),
        ("from scores import again as reward", True),
        ("from scores import call as reward", True),
        ("from no_such import reward", False),
        ("async def reward(prompts, responses, references): ...", True),
    ],
)
def test_a_function_reads_true_answers_by_its_parameter(tmp_path, monkeypatch, source, reads):
    (tmp_path / "scores.py").write_text(SCORES)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my.py").write_text(source)
    assert reads_references(CallableReward(callable=f"{tmp_path}/my.py:reward")) is reads


def test_imports_are_followed_until_they_come_back(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "pack").mkdir()
    for name, text in {
        "scores": SCORES, "mine": "from .scores import exact",
        "one": "from pack.other import f", "other": "from pack.one import f",
    }.items():  # fmt: skip
        (tmp_path / "pack" / f"{name}.py").write_text(text)
    assert reads_references(CallableReward(callable="pack.mine:exact"))
    assert not reads_references(CallableReward(callable="pack.one:f"))


def test_scorers_that_read_true_answers():
    texts = {"as_good": "As good as {reference}.", "good": "Good."}
    rubrics = [{"name": name, "rubric": text, "openai": CHAT} for name, text in texts.items()]
    rewards = ppo_config(rewards=[{"reference": "exact"}, {"code": "python"}, *rubrics]).rewards
    assert [*map(reads_references, rewards)] == [True, True, True, False]


def test_a_module_is_found_without_importing_its_package(tmp_path, monkeypatch):
    file = tmp_path / "pack" / "sub" / "mine.py"
    file.parent.mkdir(parents=True)
    for folder in file.parents[:2]:
        (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    file.write_text("def f(prompts, responses): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = CallableReward(callable="pack.sub.mine:f")
    assert source_file(reward.callable) == file
    assert [*judge_faults([reward], "ppo.rewards")] == []
    (fault,) = judge_faults([CallableReward(callable="no_such.module:f")], "ppo.rewards")
    assert "found no module no_such.module. Fix: install it" in fault


@pytest.mark.parametrize(
    ("files", "fields", "message"),
    [
        ({}, {}, "found no config.json, expected a folder with a model"),
        ({"config.json": "{"}, {}, "config.json: found Expecting property name enclosed in double"),
        ({"config.json": "{}"}, {}, "is not a reward model: found 2 labels, expected 1"),
        ({"config.json": ONE_LABEL}, {}, "found no token_contract.json, expected the policy's"),
        ({"config.json": ONE_LABEL}, {"retokenize": True}, "found no tokenizer_config.json"),
        ({"config.json": ONE_LABEL, "tokenizer_config.json": ""}, {"retokenize": True}, None),
        ({"config.json": ONE_LABEL, "token_contract.json": ""}, {}, None),
    ],
)  # fmt: skip
def test_a_reward_model_s_folder(tmp_path, files, fields, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    found = [*judge_faults([ModelReward(path=str(tmp_path), **fields)], "ppo.rewards")]
    assert found == [] if message is None else message in found[0]
