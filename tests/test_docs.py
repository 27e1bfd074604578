"""The documentation names files that exist, links that resolve, and code that applies."""

import re
from pathlib import Path

import pytest
from extending_page import EXAMPLE

PROJECT = Path(__file__).parents[1]
PACKAGE = PROJECT / "src" / "rlhf_pipeline"
EXTENDING = PROJECT / "docs" / "extending.md"
PAGES = [PROJECT / name for name in ("README.md", "CONTRIBUTING.md")]
PAGES += sorted((PROJECT / "docs").rglob("*.md"))

PATH = re.compile(r"(?<![\w./<{$-])(?:[\w-]+/)+[\w.-]*\.(?:py|md|ya?ml|ipynb|toml|png)\b")
MODULE = re.compile(r"\brlhf_pipeline(?:\.\w+)+")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
EXCERPT = re.compile(r"^`([\w./-]+\.py)`:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TREE_LINE = re.compile(r"^((?:  )*)([\w./-]+)(?:  +\S.*)?$")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def folders_of(root: Path) -> set[str]:
    """Folders with Python files, directly or below; not the link to the configuration."""
    folders = (path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    return {path.name for path in folders if any(path.rglob("*.py"))}


OWN_FOLDERS = folders_of(PACKAGE) | {
    "src", "docs", "tests", "conf", "benchmarks", "examples", "notebooks",
}  # fmt: skip
RESULTS = ("conf/local/", "data/tiny/", "data/03_split/")
"""Files of the user, and of runs."""


def anchors(page: Path) -> set[str]:
    """The anchors that headings have on GitHub."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_files_and_modules_exist(page):
    for path in PATH.findall(page.read_text()):
        if path.split("/")[0] not in OWN_FOLDERS or path.startswith(RESULTS):
            continue
        places = (PROJECT / path, PACKAGE / path, page.parent / path, EXAMPLE / path)
        assert any(place.exists() for place in places), f"{page.name}: {path}"
    for name in MODULE.findall(FENCE.sub("", page.read_text())):
        path = Path("src", *name.split("."))
        files = (path, path.with_suffix(".py"), path.parent.with_suffix(".py"))
        assert any((PROJECT / file).exists() for file in files), f"{page.name}: {name}"


@pages
def test_links_resolve(page):
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_the_file_tree_lists_every_package_and_module_and_nothing_else():
    page = (PROJECT / "docs" / "architecture.md").read_text()
    blocks = [each for each in FENCE.findall(page) if "src/rlhf_pipeline/\n" in each]
    (block,) = [each for each in blocks if "  pipelines/" in each]
    paths, parents = [], []
    for line in block.splitlines()[1:-1]:
        match = TREE_LINE.match(line)
        assert match, f"not a line of a file tree: {line!r}"
        parents = [*parents[: len(match[1]) // 2], match[2]]
        paths.append("".join(parents))
    assert len(paths) == len(set(paths))
    assert [path for path in paths if not (PROJECT / path).exists()] == []
    inside = [path.removeprefix("src/rlhf_pipeline/") for path in paths]
    listed = {path.rstrip("/") for path in inside if re.fullmatch(r"\w+/", path)}
    others = {"conf", "docs", "tests", "benchmarks", "starter", "notebooks"}
    assert listed - others == folders_of(PACKAGE)
    assert {path.name for path in PACKAGE.glob("[!_]*.py")} <= {Path(path).name for path in paths}


def test_the_examples_are_parts_of_the_example_package():
    excerpts = dict(EXCERPT.findall(EXTENDING.read_text()))
    assert len(excerpts) > 3
    for path, text in excerpts.items():
        assert text in (EXAMPLE / path).read_text(), path


def test_python_blocks_compile():
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S):
            compile(block, page.name, "exec")
