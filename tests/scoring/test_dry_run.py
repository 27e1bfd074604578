"""What is wrong with functions and tokenizers is known before a run starts."""

import json
import shutil

import pytest

from rlhf_pipeline.scoring.dry_run import try_function, try_models

ASKED = [[{"role": "user", "content": "What is 2 + 3?"}]] * 3
RESPONSES = ["The answer is 5.", "No.", ""]
FUNCTIONS = """
import asyncio, os, sys, time

def good(prompts, responses): print("noise"); return [len(r) for r in responses]
async def later(prompts, responses): return [1.0 for r in responses]
def tokens(prompts, responses, scored): return None
def level(prompts, responses, level): return [one / 2 for one in level]
def right(prompts, responses, references): return [float(a in b) for a, b in
                                                   zip(references, responses)]
def none(prompts, responses): return None
def raises(prompts, responses): raise KeyError("score")
"""


@pytest.fixture
def faults(tmp_path):
    """The faults of a function of this file, or of another text, and whether they are certain."""

    def faults(name, text=FUNCTIONS, is_known=True, processes=0, **more):
        file = tmp_path / "my.py"
        file.write_text(text)
        call = [ASKED, RESPONSES, {"references": ["5"] * 3} | more] if is_known else None
        carried = {"a": list(more)} if is_known else {}
        found = try_function("here", f"{file}:{name}", call, processes, carried)
        said = [(fault.replace(str(file), "my.py"), is_certain) for fault, is_certain in found]
        return [(fault.removeprefix("here: "), is_certain) for fault, is_certain in said]

    return faults


@pytest.mark.parametrize("name", ["good", "later", "right"])
@pytest.mark.parametrize("processes", [0, 1])
def test_a_sound_function_has_no_fault(faults, name, processes):
    assert faults(name, processes=processes) == []


def test_a_function_gets_the_columns_of_the_first_rows(faults):
    assert faults("level", level=[1, 2, 3]) == []
    ((fault, is_certain),) = faults("level", level=["a", "b", "c"])
    assert "TypeError: unsupported operand" in fault and not is_certain
    assert faults("tokens") == []
    assert faults("right", references=[]) == [], "no prompt has a true answer"


@pytest.mark.parametrize("name", ["level", "right", "none", "raises"])
def test_without_prompts_a_function_is_imported_and_not_called(faults, name):
    assert faults(name, is_known=False) == []
    ((fault, is_certain),) = faults("f", "def f(prompts): ...", is_known=False)
    assert is_certain and fault.startswith("my.py:f cannot be called with (prompts, responses): ")


@pytest.mark.parametrize(
    ("body", "is_certain"),
    [
        ("return None", True),
        ("return ['good'] * 3", True),
        ("return [1.0]", True),
        ("return [len(r.split()[0]) for r in responses]", False),
        ("raise KeyError('score')", False),
        ("return [lenn(r) for r in responses]", True),
        ("import no_such_package", True),
        ("from os import no_such_name", True),
        ("return [os.length(r) for r in responses]", True),
        ("return [good() for r in responses]", True),
        ("return [good(a=1) for r in responses]", True),
        ("import broken_module", True),
        ("for r in responses[9:]: number = 1\n    return [number]", False),
        ("return [eval(r.split()[0]) for r in responses]", False),
        ("return [int(None) for r in responses]", False),
        ("return [r.score for r in responses]", False),
        ("raise ValueError('no process group')", False),  # as torch.distributed, outside a rank
    ],
)
def test_what_fails_with_every_batch_is_certain(faults, tmp_path, monkeypatch, body, is_certain):
    (tmp_path / "broken_module.py").write_text("def f(:")
    monkeypatch.syspath_prepend(tmp_path)
    ((_, found),) = faults("f", f"{FUNCTIONS}\ndef f(prompts, responses):\n    {body}\n")
    assert found == is_certain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_package\ndef f(prompts, responses): ...",
         "my.py:f cannot be imported: ModuleNotFoundError: No module named 'no_such_package'. Fix"),
        ("def f(:", "my.py:f cannot be imported: SyntaxError: invalid syntax"),
        ("def other(): ...\ndef g():\n    f = 1",
         "my.py:f: found functions g, other in my.py, expected f. Fix: correct the name"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_imported_is_named(faults, text, message):
    ((fault, is_certain),) = faults("f", text)
    assert is_certain and fault.startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        "def f(prompts, responses, references): ...",
        "def f(*texts, **others): ...",
        "def f(prompts, /, responses, weight=1.0, *, references=None): ...",
        "if True:\n    def f(prompts, responses): ...",
        "from functools import partial\ndef g(weight, prompts, responses): ...\nf = partial(g, 1)",
    ],
)
def test_a_function_that_scoring_can_call_passes(faults, text):
    assert faults("f", text, is_known=False) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(*, prompts, responses): ...", "too many positional arguments"),
        ("class F:\n    def __call__(self, responses): ...\nf = F()", "too many positional"),
        ("def made(x): return lambda one: x\nf = made(1)", "too many positional arguments"),
        ("def f(references, responses): ...", "multiple values for argument 'references'"),
    ],
)
def test_a_function_that_scoring_cannot_call_is_refused(faults, text, message):
    """Scoring comes after SFT and the reward model."""
    ((fault, is_certain),) = faults("f", text)
    assert fault.startswith(f"my.py:f cannot be called with (prompts, responses): {message}")
    assert is_certain and fault.endswith(
        "Fix: define it as `def reward(prompts, responses)`; a further parameter "
        "`references` gets the reference answers, `scored` the tokens"
    )


@pytest.mark.parametrize(
    ("name", "processes", "expected"),
    [
        ("level", 0, "my.py:level asks for level, which a does not carry. Fix: add `extra: "
         "[level]` to the columns of a, or give level a default"),
        ("tokens", 2, "my.py:tokens: found processes: 2 and the parameter scored, which no process "
         "gets. Fix: set processes to 0"),
    ],
)  # fmt: skip
def test_what_a_function_asks_for_and_does_not_get_is_refused(faults, name, processes, expected):
    assert faults(name, processes=processes) == [(expected, True)]


@pytest.fixture
def folder(make_model, tmp_path):
    """A model with its tokenizer; entries of its JSON files can be changed."""

    def folder(file="config.json", name="model", **entries):
        made = tmp_path / name
        shutil.copytree(make_model("llama"), made)
        values = json.loads((made / file).read_text())
        (made / file).write_text(json.dumps(values | entries))
        return {"path": str(made)}

    return folder


def test_a_sound_model_has_no_fault(folder):
    lora = {"ppo.actor.lora.target_modules": ["q_proj"]}
    models = {"base_model": folder(), "distill.teacher": folder(name="teacher")}
    assert [*try_models(models, lora)] == []


def test_a_teacher_without_an_end_is_refused(folder):
    teacher = folder("tokenizer_config.json", eos_token=None)
    ((fault, is_certain),) = try_models({"distill.teacher": teacher}, {})
    assert is_certain and fault.startswith("distill.teacher.path: tokenizer /")
    assert "found no EOS token, so a response could" in fault


def test_a_model_that_this_process_cannot_build_stops_no_run(folder):
    layers = {"sft.lora.target_modules": ["q_proj"]}
    ((fault, is_certain),) = try_models({"base_model": folder(hidden_act="none")}, layers)
    assert not is_certain and fault.startswith("base_model.path: KeyError: ")


def test_a_misspelt_layer_is_refused(folder, architecture):
    lora = {"grpo.actor.lora.target_modules": ["q_projj"]}
    message = (
        "grpo.actor.lora.target_modules: found 'q_projj' (did you mean q_proj?), expected "
        "all-linear or linear layers of llama: "
    )
    for model in (folder(), {"architecture": architecture("llama"), "vocab_size": 300}):
        ((fault, is_certain),) = try_models({"base_model": model}, lora)
        assert is_certain and fault.startswith(message)


def test_a_teacher_with_another_tokenizer_is_refused(folder, tmp_path):
    models = {"base_model": folder(), "distill.teacher": folder(name="teacher")}
    (tmp_path / "teacher" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    ((fault, _),) = try_models(models, {})
    assert fault.startswith(
        "distill.teacher.path: base_model.path and distill.teacher.path use different tokenizers: "
        "chat_template_digest is "
    )
