"""The generated parts of the manual are those of the code."""

import re
from itertools import pairwise

import pytest
from pydantic import ValidationError
from test_docs import PROJECT, anchors

from rlhf_pipeline.cli import COMMANDS
from rlhf_pipeline.config.policies import DistillConfig, GRPOConfig
from rlhf_pipeline.pipelines.table import parameter_blocks

PARAMETERS = PROJECT / "docs" / "parameters.md"


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.syspath_prepend(PROJECT / "docs" / "generator")
    import reference

    return reference


@pytest.mark.parametrize("page", ["parameters", "commands", "concepts"])
def test_the_committed_page_is_that_of_the_code(reference, page):
    text = (PROJECT / "docs" / f"{page}.md").read_text()
    assert reference.PART.search(text)
    assert text == reference.filled(text), f"docs/{page}.md is outdated. Fix: make reference"


def section(heading: str) -> str:
    """The text of a section of the page of parameters."""
    pieces = re.split(r"^##+ (.+)$", PARAMETERS.read_text(), flags=re.MULTILINE)
    return dict(pairwise(pieces))[heading]


def test_every_parameter_has_a_line_or_a_link():
    for name, block in parameter_blocks().items():
        text = section(f"`{name}`")
        assert [
            field
            for field in block.model_fields
            if field not in block.unused
            and f"- `{field}:" not in text
            and f"`{field}`" not in text.rpartition("hose of [")[2]
        ] == []


def test_a_block_shows_defaults_in_effect_and_links_to_what_it_inherits():
    text = section("`grpo`")
    assert re.search(r"^Also those of \[`ppo`\]\(#ppo\), with its defaults: ", text, re.M)
    assert "`clip_range`" in text and "- `clip_range: 0.2` (number > 0): " in section("`ppo`")
    assert "- `actor: {optimizer: {learning_rate: 1.0e-6}}` " in text
    assert "- `actor: {optimizer: {learning_rate: 3.0e-6}}` " in section("`ppo`")


@pytest.mark.parametrize(
    ("block", "given"), [(GRPOConfig, {}), (DistillConfig, {"teacher": "folder"})]
)
def test_what_the_page_leaves_out_is_refused(block, given):
    block.model_validate(given)
    with pytest.raises(ValidationError, match="lam"):
        block.model_validate(given | {"lam": 0.5})
    for name in block.unused:
        assert f"`{name}" not in section(f"`{block.stage}`")
        assert f"`{block.stage}.{name}" not in PARAMETERS.read_text()


def test_every_heading_has_its_anchor_and_every_command_a_section():
    headings = re.findall(r"^#+ (.+)$", PARAMETERS.read_text(), re.MULTILINE)
    assert len(headings) == len(anchors(PARAMETERS))
    for page in ("parameters", "commands"):  # a wrapped line begins no item of a list by chance
        text = (PROJECT / "docs" / f"{page}.md").read_text()
        assert re.findall(r"^ +[-+*] .*", text, re.MULTILINE) == []
    found = anchors(PROJECT / "docs" / "commands.md")
    assert {f"kedro-rlhf-{name}" for name in COMMANDS} | {"kedro-run"} <= found
