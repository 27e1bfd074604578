"""The table of sources in docs/data.md."""

import re
from pathlib import Path

from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.data.sources.registry import MODULES, find_source

PAGE = Path(__file__).parents[3] / "docs" / "data.md"


def test_the_page_lists_and_describes_every_source_under_its_kind():
    table = PAGE.read_text().partition("<!-- sources -->\n")[2].partition("<!-- /sources -->")[0]
    listed = {}
    for line in table.splitlines()[2:]:
        kind, sources = line.strip("| ").split(" | ")
        listed[kind] = re.findall(r"`([\w./-]+)` \((?:[^()]|\([^()]*\))+\)", sources)
    known = {}
    for name in MODULES:
        source = find_source(SourceConfig.model_construct(name=name))
        assert source.name == name
        known.setdefault(source.kind, []).append(name)
    assert listed == known
