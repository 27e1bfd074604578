"""The package of docs/extending.md, `my_rlhf`, which is in the folder of examples."""

import json
import re
import shutil
from pathlib import Path

from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.data.sources.registry import read

EXAMPLE = Path(__file__).parents[1] / "examples" / "my_rlhf"
DOORS = {
    "split.sources": [{"name": "my_rlhf.sources:PKU", "path": "pairs.jsonl"}],
    "reward_model.loss": "my_rlhf.losses:hinge",
    "dpo.loss": "my_rlhf.losses:apo_zero",
    "ppo.policy_loss": "gspo",
    "ppo.advantage": "my_rlhf.advantages:normalized",
    "ppo.critic": None,
    "ppo.generator": "my_rlhf.generators:PlainGenerator",
    "ppo.rewards": ["trained", {"callable": "my_rlhf.rewards:concise", "weight": 0.5}],
    "evaluate.generator": "my_rlhf.generators:PlainGenerator",
    "evaluate.judges": ["concise"],
}
"""Parameters that name its code, in both forms."""


def write_project(root: Path) -> Path:
    """Copy the project; return the folder with the package."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(EXAMPLE, root, dirs_exist_ok=True, ignore=unwanted)
    return root / "src"


def write_metadata(src: Path) -> None:
    """Declare the entry points beside the package, as an installation does."""
    (folder := src / "my_rlhf-0.1.0.dist-info").mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: my_rlhf\nVersion: 0.1.0\n")
    _, *groups = (EXAMPLE / "pyproject.toml").read_text().split("[project.entry-points.")
    text = "".join(re.sub(r'"(.*)"\]', r"[\1]", group, count=1) for group in groups)
    (folder / "entry_points.txt").write_text(text.replace('"', ""))


def write_pairs(path: Path, count: int) -> None:
    """Write rows that its source reads."""
    with path.open("w") as file:
        for _, example in read(SourceConfig(samples=count), seed=1):
            answers = {"response_0": example.rejected, "response_1": example.chosen}
            row = {"prompt": example.prompt[0].content, **answers, "better_response_id": 1}
            file.write(json.dumps(row) + "\n")
