"""WikiText: good and featured articles of Wikipedia, for PPO's language-model loss.

Merity et al. 2016, "Pointer Sentinel Mixture Models". A row is a line: a paragraph, an empty line,
or a heading with one equals sign per level on each side. So " = Title = " begins an article.
"""

import re

from rlhf_pipeline.data.records import Text, Unused
from rlhf_pipeline.data.sources.adapter import Records, Row, Rows, Source, outcome, text

_TITLE = re.compile(r" = [^=].* = ?")


def assemble(rows: Rows) -> Records:
    """Yield each article as one text, without blank lines."""
    start, article = "", list[str]()
    for place, row in rows:
        lines = outcome(_lines, row)
        if isinstance(lines, Unused):
            yield place, lines
            continue
        for line in lines:
            if article and _TITLE.fullmatch(line):
                yield start, Text("\n".join(article))
                article = []
            start = start if article else place
            article.append(line.strip())
    if article:
        yield start, Text("\n".join(article))


def _lines(row: Row) -> list[str]:
    """The lines of a row: one on the hub, many in a text file."""
    return [line for line in text(row, "text").split("\n") if line.strip()]


SOURCES = (
    Source(
        name="Salesforce/wikitext",
        kind="text",
        description="English Wikipedia's good and featured articles, about 28,000",
        columns=("text",),
        assemble=assemble,
        subset="wikitext-103-raw-v1",
    ),
)
