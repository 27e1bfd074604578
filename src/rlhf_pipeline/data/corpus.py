from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_pipeline.data.record_files import example_batch, examples
from rlhf_pipeline.data.template import plain_text


def corpus(sources: Sequence[Path]) -> Iterator[str]:
    """Yield every prompt and answer of the sources as plain dialogue text."""
    for source in sources:
        for records in examples(source).to_batches():
            batch = example_batch(records)
            for prompt, *answers in zip(batch.prompts, batch.chosen, batch.rejected, strict=True):
                turns = [[{"role": "assistant", "content": a}] for a in answers if a is not None]
                first, *others = turns or [[]]
                yield plain_text([*prompt, *first])
                yield from map(plain_text, others)
