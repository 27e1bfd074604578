"""Write the tasks of the environment `tools` into `data/tools_tasks/`: sums, and how to ask a
calculator for them.

    python conf/tools/tasks.py

    demonstrations.jsonl   asked to calculate, it calls the calculator; else it seldom does
    sums.jsonl             questions with true answers, for the policy and its evaluation

So a policy that learns from the demonstrations can use the calculator, but seldom does.
"""

import json
import random
import sys
from pathlib import Path

from transformers.utils import get_json_schema

sys.path.insert(0, str(Path(__file__).parent))
from world import calculate

FOLDER = Path("data/tools_tasks")
DEMONSTRATIONS, SUMS = 6_000, 3_000
CALLED = 0.04  # share of the plain questions for which the calculator is called


def numbers(chance: random.Random) -> str:
    """Four numbers to add."""
    return " + ".join(str(chance.randint(1, 9)) for _ in range(4))


def demonstration(chance: random.Random) -> dict[str, object]:
    """A dialogue with the schema of the calculator."""
    expression, asked = numbers(chance), chance.random() < 0.5
    question = f"{'Calculate' if asked else 'What is'} {expression}?"
    turns: list[dict[str, object]] = [{"role": "user", "content": question}]
    if asked or chance.random() < CALLED:
        function = {"name": "calculate", "arguments": {"expression": expression}}
        found = calculate(expression)
        turns += [
            {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
            {"role": "tool", "name": "calculate", "content": found},
            {"role": "assistant", "content": f"It is {found}."},
        ]
    else:
        turns += [{"role": "assistant", "content": "I do not know."}]
    return {"messages": turns, "tools": [get_json_schema(calculate)]}


def sums(chance: random.Random) -> dict[str, str]:
    """A question with its true answer."""
    expression = numbers(chance)
    return {"prompt": f"What is {expression}?", "answer": calculate(expression)}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make, count in (
        ("demonstrations", demonstration, DEMONSTRATIONS),
        ("sums", sums, SUMS),
    ):
        chance = random.Random(name)
        rows = [json.dumps(make(chance)) for _ in range(count)]
        (FOLDER / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        print(f"{FOLDER / name}.jsonl: {count:,} rows")
