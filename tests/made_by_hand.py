"""An evaluation that is made by hand: answers, a registration, artifacts."""

import json
from dataclasses import replace

from rlhf_pipeline.runtime.manifest import CURVES, NAME, Manifest, file_entries
from rlhf_pipeline.verdict.answers import Answer

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
"""An answer that would run in a page that does not escape it."""

CHECK = {"found": "0.62", "expected": "more than 0.5", "parameter": "min_gain"}
REGISTRATION = {
    "model": "policy",
    "aliases": {"champion": "2", "candidate": "4"},
    "runs": {"ppo": "run-of-ppo"},
    "promoted": False,
    "verdict": {
        "judge": "gold", "state": "independent", "tries": 3, "confidence": 0.9917,
        "checks": [CHECK | {"what": "gain", "passed": True},
                   CHECK | {"what": "the champion", "passed": False}],
        "refusals": ["the champion: found 0.62, expected more than 0.5"],
    },
}  # fmt: skip


def answer(row, policy):
    """PPO gains row - 30 by the gold judge; the reward model prefers it always."""
    text = f"The answer to {row} is {'never' if policy == 'sft' else 'always'} the same."
    scores = {"score": float(policy == "ppo"), "gold": row - 30.0 if policy == "ppo" else 0.0}
    if row == 0:
        text = HOSTILE
    return Answer(row, f"User: question {row}", text, scores, row / 60, -20.0, 10 + row, True)


def artifact(folder, stage, metrics=(), inputs=None, answers=None, **config):
    """A finished artifact of a stage, whose records of training are `metrics`, step by step.

    `answers` are those that were sampled, by step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights").write_text(stage)
    records = [{"step": step, "metrics": given} for step, given in enumerate(metrics, start=1)]
    for step, sampled in (answers or {}).items():
        records[step - 1]["answers"] = sampled
    if records:
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / CURVES).write_text(lines)
    last = {"step": len(records), **records[-1]["metrics"]} if records else {}
    Manifest(
        stage, f"{stage}-fingerprint", 7, config, inputs or {}, {"torch": "2.13.0"}, last,
        file_entries(folder),
    ).write(folder)  # fmt: skip
    return folder


def sealed(folder):
    """Give a folder the manifest of the files that are in it now; return the folder."""
    made = Manifest("evaluate", "evaluate-fingerprint", 7, {}, {}, {}, {}, {})
    made = Manifest.read(folder) if (folder / NAME).is_file() else made
    replace(made, files=file_entries(folder)).write(folder)
    return folder
