"""Every benchmark can be started: what it imports exists."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_what_a_benchmark_imports_exists(name, monkeypatch):
    """Also within its functions, which no test calls."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for node in ast.walk(ast.parse((BENCHMARKS / f"{name}.py").read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom) and is_installed(node):
            exec(ast.unparse(node), {})


def is_installed(node: ast.Import | ast.ImportFrom) -> bool:
    """Whether the package is there. PPO is in an older TRL, which the benchmarks install."""
    name = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
    return name != "trl.experimental.ppo" and (name != "trl" or find_spec("trl") is not None)
