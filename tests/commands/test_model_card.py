"""The model card: only what is recorded, and nothing of this machine."""

import json

import pytest
import yaml
from made_by_hand import sealed
from stand_in_hub import serving

from rlhf_pipeline.commands.export import model_card
from rlhf_pipeline.kedro_run.artifacts import Policy
from rlhf_pipeline.runtime.certificates import Certificate
from rlhf_pipeline.runtime.manifest import Manifest

DIGEST = "d" * 64
RATE = {"rate": 0.625, "lower": 0.5, "upper": 0.75, "wins": 4, "ties": 2, "losses": 2, "n": 8}
EVALUATION = {
    "candidate": "ppo", "judge": "gold", "prompts": 8, "answers_per_prompt": 1, "differing": 0.5,
    "decoding": {"temperature": 1.0},
    "judges": {"gold": {"state": "independent", "by": {}}},
    "policies": {
        "sft": {"gold_score": 1.0, "gold_score_lower": 0.5, "gold_score_upper": 1.5, "kl": 0.0},
        "ppo": {"gold_score": 2.0, "gold_score_lower": 1.75, "gold_score_upper": 2.25, "kl": 0.5},
    },
    "win_rates": {"gold": RATE | {"paired": RATE, "length_controlled": None}},
    "rewards": ["trained"], "variants": {},
}  # fmt: skip


def manifest(stage, config, **inputs):
    return Manifest(stage, f"{stage:f<64}", 7, config, inputs, {"torch": "2.13.0"}, {}, {})


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch):
    """A hub on this machine, and its folder of repositories."""
    with serving(tmp_path / "hub") as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
        yield tmp_path / "hub"


def card(
    *stages, evaluations=(), registered=None, license_name="unknown", adapter_of=None, proofs=None
):
    made_from = {each.stage: each for each in stages}
    policy = Policy("champion", "ppo", made_from, tuple(evaluations))
    model = policy, DIGEST, "rlhf-policy", registered
    text = model_card(*model, license_name, adapter_of, proofs or {})
    return text, yaml.safe_load(text.split("---\n")[1])


PPO = manifest("ppo", {"ppo": {"steps": 40, "kl": {"coef": 0.1}, "ema": None}}, prompts="a" * 64)


def test_a_certificate_is_shown_with_its_processor():
    proof = Certificate("ppo", "k" * 64, {}, 2, "AMD EPYC", 7, {})
    proof.note("resume", "killed after step 2", None)
    proof.note("repeat", "trained again", "step 3: other rows")
    text, _ = card(PPO, proofs={"ppo": proof})
    assert (
        "Of trainings like that of ppo, `kedro rlhf prove` found on AMD EPYC, bit for bit: "
        "resume: 1 of 1 equal; repeat: 0 of 1 equal."
    ) in text
    assert "kedro rlhf prove" not in card(PPO)[0]


def test_numbers_have_their_intervals_and_the_verdict_its_conditions(tmp_path):
    (tmp_path / "evaluation.json").write_text(json.dumps(EVALUATION))
    manifest("evaluate", {"candidate": {"name": "ppo"}}).write(tmp_path)
    check = {"what": "KL from SFT", "found": "0.5 nats", "expected": "at most 10", "passed": True}
    verdict = json.dumps({"refusals": [], "tries": 2, "checks": [check]})
    registered = "3", {"rlhf.verdict": verdict}
    text, _ = card(PPO, evaluations=[(sealed(tmp_path), "ppo")], registered=registered)
    assert "# rlhf-policy PPO, version 3" in text
    assert "prefers PPO's answer to SFT's on 62.5% (95%: 50.0% to 75.0%) of 8 prompts" in text
    assert "| gold score | 1.00 \\[0.50, 1.50\\] | 2.00 \\[1.75, 2.25\\] | +1.00 |" in text
    assert "The promotion gate passed it at attempt 2" in text
    assert "| KL from SFT | 0.5 nats | at most 10 | yes |" in text
    assert "| | sft | ppo | ppo minus sft |\n|:---|---:|---:|---:|\n" in text  # a table


def test_lineage_and_training(hub):
    model = hub / "facebook" / "opt-350m" / ("b" * 40)
    model.mkdir(parents=True)
    (model / "README.md").write_text("---\nlicense: other\n---\n")
    source = manifest("source", {"source": {"name": "Dahoas/rm-static"}}, commit="c" * 40)
    base = manifest("base_model", {"base_model": {"path": "facebook/opt-350m"}}, commit="b" * 40)
    text, front = card(PPO, source, base, license_name='apache-2.0"\ntags: [x]')
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": 'apache-2.0"\ntags: [x]',  # a hostile name stays one value
        "tags": ["rlhf", "ppo"],
        "base_model": ["facebook/opt-350m"],
        "datasets": ["Dahoas/rm-static"],
    }
    assert f"| base model | facebook/opt-350m | commit {'b' * 40} | other |" in text
    # The hub of this test does not know the data set.
    assert f"| data | Dahoas/rm-static | commit {'c' * 40} | unknown |" in text
    assert "| ppo | ppofffffffffffff | 7 | prompts aaaaaaaaaaaaaaaa |" in text
    assert "| ppo.steps | 40 |" in text and "| ppo.kl.coef | 0.1 |" in text
    assert "ppo.ema" not in text
    assert f"SHA-256 {DIGEST}" in text and "torch 2.13.0" in text


def test_without_records_it_says_unknown_and_an_adapter_names_its_base():
    text, front = card(PPO, adapter_of="me/my-sft")
    assert "from peft import AutoPeftModelForCausalLM as Model" in text
    assert (front["library_name"], front["base_model"]) == ("peft", ["me/my-sft"])
    assert front["license"] == "unknown"
    assert "Unknown: no evaluation of this policy by this version is recorded." in text
    assert "The verdict of the promotion gate is unknown." in text
    assert "| base model and data | unknown | unknown | unknown |" in text


def test_local_paths_are_not_shown_and_their_licence_is_read(tmp_path):
    folder = tmp_path / "secret project" / "Mine|<b>"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    base = manifest("base_model", {"base_model": {"path": str(folder)}}, bytes="e" * 64)
    own = {"source": {"name": "files", "path": f"{tmp_path}/rows.csv"}}
    text, front = card(PPO, base, manifest("source", own, file="f" * 64))
    assert "secret project" not in text and str(tmp_path) not in text
    assert f"| base model | Mine\\|&lt;b> | bytes {'e' * 64} | mit |" in text
    assert "| data | files (rows.csv) | file " in text
    assert "base_model" not in front and "datasets" not in front
