"""Measure time and memory of the split, compared with the tokenizer alone on the same text.

    python benchmarks/preparation.py --like harmless-base-test.jsonl.gz [--pairs 160000]

The benchmark generates comparisons with the turn lengths and words of an HH-RLHF file. The words of
a turn are shuffled, so all prompts differ. A tokenizer of 32,000 tokens is trained on them.
Measured:

- preparation: stages `source` and `split`, run as by `kedro run`, from the file to the artifact,
- the same again, when both results are reused,
- raw: `tokenizer(texts)` in batches of 1,000, for all prompts and answers of the file.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.split import SourceConfig, SplitConfig
from rlhf_pipeline.data.record_files import example_rows, examples
from rlhf_pipeline.models.base_model import build_model, train_tokenizer
from rlhf_pipeline.pipelines.preparation import BASE_MODEL, source_job, split
from rlhf_pipeline.stages.job import Job, RunContext
from rlhf_pipeline.stages.run import StageRunner

ARCHITECTURE = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
LAUNCH = LaunchConfig(processes=2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--like", type=Path, required=True, help="an HH-RLHF file (.jsonl.gz) to imitate"
    )
    parser.add_argument("--pairs", type=int, default=160_000)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        file = root / "pairs.jsonl"
        generate(arguments.like, file, arguments.pairs)
        base_model = build_base_model(file, arguments.vocabulary, root)
        config = SplitConfig(
            sources=[{"name": "Anthropic/hh-rlhf", "path": str(file)}],
            validation_fraction=0.02,
            test_fraction=0.02,
            max_prompt_tokens=512,
            max_response_tokens=256,
            over_long_prompts="drop",
            over_long_responses="drop",
            max_bad_fraction=0.01,
        )

        def prepare() -> Path:
            return split(base_model, config, None, 0, stages(root / "workspace"))

        _, first_s = timed(prepare)
        peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        _, second_s = timed(prepare)
        records = content_of(root / "workspace" / "source")
        tokenizer = AutoTokenizer.from_pretrained(base_model)
        _, raw_s = timed(lambda: tokenize(texts_of(records), tokenizer))
        show(arguments.pairs, first_s, second_s, peak_mib, raw_s)


def stages(workspace: Path) -> StageRunner:
    return StageRunner(RunContext(workspace, LAUNCH))


def generate(like: Path, file: Path, pairs: int) -> None:
    """Write comparisons with the turns of `like`, the words of each turn shuffled."""
    rng = random.Random(0)
    with gzip.open(like, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    with file.open("w") as output:
        for index in range(pairs):
            row = rows[index % len(rows)]
            shared = len(shared_start(row["chosen"], row["rejected"]))
            start = shuffled(row["chosen"][:shared], rng)
            fresh = {
                name: start + shuffled(row[name][shared:], rng) for name in ("chosen", "rejected")
            }
            output.write(json.dumps(fresh) + "\n")


def shared_start(one: str, other: str) -> str:
    """The shared beginning of both dialogues, up to the last answer."""
    end = one.rfind("\n\nAssistant:") + len("\n\nAssistant:")
    return one[:end] if other.startswith(one[:end]) else ""


def shuffled(dialogue: str, rng: random.Random) -> str:
    def one_turn(turn: str) -> str:
        speaker, colon, words = turn.partition(":")
        if not colon:
            speaker, words = "", turn
        order = words.split()
        rng.shuffle(order)
        return f"{speaker}{colon}{' ' if order else ''}{' '.join(order)}"

    return "\n\n".join(one_turn(turn) for turn in dialogue.split("\n\n"))


def build_base_model(file: Path, vocabulary: int, root: Path) -> Path:
    """Build a tiny model with a tokenizer of realistic size, trained on the first rows."""
    sample = SourceConfig(name="Anthropic/hh-rlhf", path=str(file), samples=10_000)
    records = stages(root / "sample").run(source_job(sample, 0))
    config = BaseModelConfig(architecture=ARCHITECTURE, vocab_size=vocabulary)
    tokenizer = train_tokenizer(config, [records])
    built = root / "built"
    build_model(config, tokenizer).save_pretrained(built)
    tokenizer.save_pretrained(built)
    job = Job(BASE_MODEL, {"base_model": BaseModelConfig(path=str(built))}, {}, 0)
    return stages(root / "base").run(job)


def content_of(stage: Path) -> Path:
    """The artifact of a stage that ran once."""
    [directory] = stage.iterdir()
    return directory / "export"


def texts_of(records: Path) -> list[str]:
    """Prompt and both answers of every comparison."""
    texts: list[str] = []
    for batch in examples(records).to_batches():
        for row in example_rows(batch):
            prompt = "".join(f"\n\n{turn['role']}: {turn['content']}" for turn in row["prompt"])
            texts += [prompt, row["chosen"], row["rejected"]]
    return texts


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Run the fast tokenizer in batch mode."""
    for start in range(0, len(texts), 1_000):
        tokenizer(texts[start : start + 1_000], add_special_tokens=False)


def show(pairs: int, first_s: float, second_s: float, peak_mib: float, raw_s: float) -> None:
    """Print one row per measurement."""
    table = Table("", "", title=f"Preparing {pairs:,} comparisons")
    table.add_row("raw tokenizer, all prompts and answers", f"{raw_s:.1f} s")
    table.add_row("preparation, from file to artifact", f"{first_s:.1f} s")
    table.add_row("  as a multiple of raw", f"{first_s / raw_s:.2f}")
    table.add_row("the same again, reused", f"{second_s:.2f} s")
    table.add_row("peak memory of the largest process", f"{peak_mib:,.0f} MiB")
    Console().print(table)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """The function's result, and the seconds it took."""
    start = time.perf_counter()
    return function(), time.perf_counter() - start


if __name__ == "__main__":
    main()
