"""The package of docs/extending.md, `my_rlhf`, as a project that pip installs."""

import re
from pathlib import Path

from documented_code import documented_files

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "my_rlhf"
version = "0.1.0"

[tool.setuptools.packages.find]
where = ["src"]
"""

APO_ZERO = """

def apo_zero(chosen_log_ratios, rejected_log_ratios, beta):
    losses = (-beta * chosen_log_ratios).sigmoid() + (beta * rejected_log_ratios).sigmoid()
    return losses.sum(), losses.numel()
"""
"""A loss of DPO (D'Oosterlinck et al. 2024), of which the page has no example."""

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
    """Write the project; return the folder with the package."""
    for path, text in documented_files(PAGE).items():
        (file := root / path).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "src" / "my_rlhf" / "__init__.py").touch()
    with (root / "src" / "my_rlhf" / "losses.py").open("a") as file:
        file.write(APO_ZERO)
    (root / "pyproject.toml").write_text(PROJECT + entry_points())
    return root / "src"


def write_metadata(src: Path) -> None:
    """Declare the entry points beside the package, as an installation does."""
    (folder := src / "my_rlhf-0.1.0.dist-info").mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: my_rlhf\nVersion: 0.1.0\n")
    text = re.sub(r'\[project\.entry-points\."(.*)"\]', r"[\1]", entry_points())
    (folder / "entry_points.txt").write_text(text.replace('"', ""))


def entry_points() -> str:
    """The entry points, as they stand in pyproject.toml."""
    (block,) = re.findall(r"^```toml\n# pyproject.toml\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return block
