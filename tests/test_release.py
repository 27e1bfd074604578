"""A release: one version and date everywhere, its licence, and the versions it was tested with."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[1]
METADATA = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]


def test_the_version_is_that_of_the_changelog_and_of_the_citation():
    heading = re.search(r"^## (\S+) - (\S+)$", (PROJECT / "CHANGELOG.md").read_text(), re.M)
    citation = yaml.safe_load((PROJECT / "CITATION.cff").read_text())
    assert heading[1] == METADATA["version"] == citation["version"]
    assert heading[2] == str(citation["date-released"])


def test_the_licence_is_in_the_wheel_and_in_the_citation():
    assert METADATA["license-files"] == ["LICENSE"]
    assert "Apache License" in (PROJECT / "LICENSE").read_text()
    assert yaml.safe_load((PROJECT / "CITATION.cff").read_text())["license"] == "Apache-2.0"


def test_every_upper_bound_has_a_reason():
    """A comment on its line says what is beyond it."""
    bare = [
        line.strip()
        for line in (PROJECT / "pyproject.toml").read_text().splitlines()
        if re.match(r'    "[\w-]+[^"]*(<|==)', line) and "#" not in line
    ]
    assert bare == []


def test_the_tested_versions_are_within_the_bounds():
    """Every requirement has a pin."""
    lines = (PROJECT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    extras = METADATA["optional-dependencies"].values()
    given = [line for lines in [METADATA["dependencies"], *extras] for line in lines]
    required = [Requirement(line) for line in given]
    assert {each.name for each in required} - set(pinned) == set()
    tested = [each for each in required if each.name in pinned]
    assert [str(each) for each in tested if pinned[each.name] not in each.specifier] == []
