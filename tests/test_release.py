"""One version: of the package, of the changelog, and of the citation."""

import re
import tomllib
from itertools import chain
from pathlib import Path

import yaml
from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[1]
PACKAGE = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]


def test_the_changelog_begins_with_the_version_and_its_date():
    headings = re.findall(r"^## (.+)$", (PROJECT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert re.fullmatch(rf"{re.escape(PACKAGE['version'])} - \d{{4}}-\d\d-\d\d", released[0])


def test_the_citation_names_the_version_and_the_day_of_the_changelog():
    citation = yaml.safe_load((PROJECT / "CITATION.cff").read_text())
    heading = f"## {citation['version']} - {citation['date-released']}"
    assert citation["version"] == PACKAGE["version"]
    assert heading in (PROJECT / "CHANGELOG.md").read_text().splitlines()


def test_every_upper_bound_has_its_reason_beside_it():
    lines = (PROJECT / "pyproject.toml").read_text().splitlines()
    extras = chain.from_iterable(PACKAGE["optional-dependencies"].values())
    required = [*PACKAGE["dependencies"], *extras]
    bounded = {each for each in required if _has_upper_bound(Requirement(each))}
    assert bounded
    for each in bounded:
        reasons = [line.partition("#")[2] for line in lines if line.strip().startswith(f'"{each}"')]
        assert any(reasons), f"{each}: no line says why"


def _has_upper_bound(requirement: Requirement) -> bool:
    return any(each.operator in ("<", "<=", "==", "~=") for each in requirement.specifier)
