"""The documentation site: it builds, its links resolve, it loads nothing from elsewhere."""

import json
import re
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from processes import completed

from rlhf_pipeline.runtime.metrics_file import read_json_lines
from rlhf_pipeline.verdict.charts import ON_PROMPTS, OTHERS

PROJECT = Path(__file__).parents[1]
EXTERNAL = {
    "arxiv.org", "filesystem-spec.readthedocs.io", "github.com", "kedro.org", "keepachangelog.com",
    "in-toto.io", "mlflow.org",
}  # fmt: skip
"""Hosts that pages link to. The tests do not fetch them: check such a link when you add it."""


class Page(HTMLParser):
    """The links of a page, what it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif target := given.get("src") or (given.get("href") if tag == "link" else None):
            self.loads.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages of the site by path, and its folder."""
    folder = tmp_path_factory.mktemp("site")
    build = ["-m", "mkdocs", "build", "--quiet", "--strict", f"--site-dir={folder}"]
    built = completed(sys.executable, *build, folder=PROJECT)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path: Page(path.read_text()) for path in folder.rglob("*.html")}
    return folder, pages


def test_every_link_resolves_or_is_listed_and_pages_load_nothing_from_elsewhere(site):
    folder, pages = site
    faults, hosts = [], set()
    for path, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                hosts |= {parts.netloc} if parts.scheme.startswith("http") else set()
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = not parts.fragment or (
                target in pages and unquote(parts.fragment) in pages[target].anchors
            )
            is_whole = target.is_file() and (known or parts.fragment.startswith("__"))
            if path.name != "404.html" and not is_whole:
                faults.append(f"{path.relative_to(folder)}: {link}")
    assert faults == []
    assert len(pages) > 30
    assert hosts == EXTERNAL
    assert [each for page in pages.values() for each in page.loads if urlsplit(each).netloc] == []


def test_a_generated_page_has_its_items_and_the_graph_is_a_picture(site):
    written = re.findall(r"^- `([^`]+)`", (PROJECT / "docs/parameters.md").read_text(), re.M)
    html = (site[0] / "parameters" / "index.html").read_text()
    built = [unescape(each) for each in re.findall(r"<li>(?:<p>)?<code>(.*?)</code>", html, re.S)]
    assert [" ".join(each.split()) for each in built] == written and len(written) > 50
    html = (site[0] / "concepts" / "index.html").read_text()
    assert '<figure class="graph"><svg' in html
    assert "flowchart" not in html and "mermaid" not in html


def documented_metrics() -> dict[str, str]:
    """What healthy looks like, by metric or pattern of metrics."""
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \|$", (PROJECT / "docs/metrics.md").read_text(), re.M)
    return {name: healthy for names, healthy in rows for name in re.findall(r"`(.+?)`", names)}


def is_documented(metric: str, documented: dict[str, str]) -> bool:
    """Whether a metric has a row: by its name, as held-out metric, or as end of an interval."""
    name = re.sub(r"_(lower|upper)$", "", metric)
    held_out = re.match(r"validation(?:_ema)?/(.+)", name)
    for pattern in documented:
        regex = re.sub(r"<\w+>", r"[\\w.-]+", re.sub(r"([.])", r"\\\1", pattern))
        if re.fullmatch(regex, name):
            return True
        if held_out and re.fullmatch(rf"(?:\w+/)?{re.escape(held_out[1])}", pattern):
            return True
    return False


@pytest.mark.slow
def test_every_metric_of_a_run_is_documented(project):
    """Those of every stage, during the run and in the manifests."""
    metrics = set()
    for file in (project.root / "07_workspace").rglob("metrics.jsonl"):
        for record in read_json_lines(file):
            metrics |= record["metrics"].keys()
    for file in (project.root / "07_workspace").rglob("manifest.json"):
        metrics |= json.loads(file.read_text())["metrics"].keys()
    metrics -= {"step"}
    assert {"objective/kl", "win_rate/score", "sft/kl_lower"} <= metrics
    documented = documented_metrics()
    assert sorted(name for name in metrics if not is_documented(name, documented)) == []


def test_the_page_of_a_run_calls_the_same_healthy():
    documented = documented_metrics()
    charts = [("ppo", ON_PROMPTS), *((stage, OTHERS) for stage in ("sft", "reward_model", "dpo"))]
    for stage, shown in charts:
        for _, pattern, note, _ in shown:
            metric = pattern.format(stage)
            assert note.rstrip(".") in documented.get(metric, note), metric
