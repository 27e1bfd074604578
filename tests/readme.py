"""What the README prints: each row of its table as parameters and as a file of that shape."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text()
BLOCK, FOR_PROMPTS = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PYTHON = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PARAMETERS = "conf/local/parameters.yml"
JUDGE = re.search(r"^A judge, such as `(evaluate: .*?)`", TEXT, re.MULTILINE)[1]
ROWS = 120

SHAPES = {
    "prompt": lambda n: asked(n),
    "completion": lambda n: f"Snow number {n} is white.",
    "messages": lambda n: [
        {"role": "user", "content": asked(n)},
        {"role": "assistant", "content": f"Snow number {n} is white."},
    ],
    "chosen": lambda n: f"Snow number {n} is white.",
    "rejected": lambda n: f"Who cares about {n}?",
    "label": lambda n: n % 2 == 0,
    "question": lambda n: f"How much is {n} plus {n}?",
    "answer": lambda n: str(n + n),
}
"""A value of each column; a row of the README with another column has no file."""


def asked(n: int) -> str:
    return f"Please tell me about {n}: what colour is snow number {n}?"


@dataclass(frozen=True)
class Row:
    """A row of the table, for one pipeline and one form of file."""

    pipeline: str
    columns: tuple[str, ...]
    change: str
    """What the row says of the block."""

    def write(self, folder: Path, model: Path) -> None:
        """The files that a reader has: parameters with a model, data, and a judge."""
        text = self.parameters()
        for place in re.findall(r"(?<=[ :])/models/[\w-]+", text):
            text = text.replace(place, str(model))
        (folder / "my.py").write_text(
            "def score(prompts, responses):\n    return [len(each) for each in responses]\n"
        )
        (file,) = re.findall(r"data/01_raw/[\w.]+", text)
        data = [{name: SHAPES[name](n) for name in self.columns} for n in range(ROWS)]
        for path, content in {
            PARAMETERS: text,
            file: "".join(f"{json.dumps(row)}\n" for row in data),
        }.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)

    def parameters(self) -> str:
        """The block that the row asks for."""
        lines, change = BLOCK.splitlines(), self.change
        if change == "use the block below":
            return "\n".join([*lines[:-1], *self._for_prompts()])
        for name in re.findall(r"(?:^|, )remove `([^`]+)`", change):
            (line,) = [each for each in lines if each.startswith(name)]
            lines.remove(line)
        added = re.findall(r"(?:add |, )`([^`]+: null)`", change)
        judges = [JUDGE] if re.search(r"(?:add|,) a \[judge\]\([^)]+\)", change) else []
        rest = re.sub(
            r"remove `[^`]+`|`[^`]+: null`|a \[judge\]\([^)]+\)|nothing|add|, ", "", change
        )
        assert not rest.strip(), f"README: {change!r} says {rest!r}, which no test understands"
        return "\n".join([*lines, *added, *judges])

    def _for_prompts(self) -> list[str]:
        """The second block with the line of the pipeline in place of the first one's."""
        lines = FOR_PROMPTS.splitlines()
        first = next(n for n, line in enumerate(lines) if line.endswith("# or one of these"))
        chosen = [line.removeprefix("# ") for line in lines[first:]]
        (own,) = [line for line in chosen if line.startswith(f"{self.pipeline}:")]
        return [*lines[:first], own]


def table() -> list[Row]:
    """The rows of the README's table."""
    (start,) = re.finditer(r"^\| NAME \|.*\n\|---.*\n", TEXT, re.MULTILINE)
    rows, forms = list[Row](), list[tuple[str, ...]]()
    for line in TEXT[start.end() :].partition("\n\n")[0].splitlines():
        names, columns, change = (cell.strip() for cell in line.strip("|").split("|"))
        if columns != "the same":
            forms = [tuple(re.findall(r"`(\w+)`", form)) for form in columns.split("; or ")]
        pipelines = re.findall(r"`(\w+)`", names)
        assert pipelines and all(forms), f"README: {line!r} has no pipeline or no columns"
        rows += [Row(name, form, change) for name in pipelines for form in forms]
    return rows
