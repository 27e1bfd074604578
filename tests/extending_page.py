"""The package of docs/extending.md, `my_rlhf`, which is in the folder of examples."""

import re
import shutil
from pathlib import Path

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
