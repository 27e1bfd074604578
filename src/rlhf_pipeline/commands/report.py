import json
import webbrowser
from pathlib import Path

from kedro.io import CatalogProtocol
from rich.console import Console

from rlhf_pipeline.commands.artifacts import all_artifacts, ancestors, folder_of, places, whole
from rlhf_pipeline.commands.compare import find
from rlhf_pipeline.commands.runs import evaluations
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.reporting.page import evaluation_page
from rlhf_pipeline.runtime.files import write_atomically


def report(
    name: str | None, catalog: CatalogProtocol, console: Console, project: Path, *, show: bool
) -> None:
    """Print the link of the page, which is made if it is missing; with `show`, open it.

    `name` is a version of an evaluation, its folder, or a policy (a version or an alias of the
    registered model, or a folder), whose newest evaluation counts. None: the newest evaluation.
    Raises ArtifactError if there is none.
    """
    evaluation = whole(find_evaluation(name, catalog, project), catalog).resolve()
    page = beside(evaluation, "page", catalog) or evaluation.with_name(f"{evaluation.name}.html")
    if not page.is_file():
        known = places(all_artifacts(catalog, Path(catalog.load("workspace"))))
        models = [path for path, _ in ancestors(evaluation, known)]
        registered = beside(evaluation, "registration", catalog)
        is_here = registered is not None and registered.is_file()
        registration = json.loads(registered.read_text()) if registered and is_here else None
        page.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(page, evaluation_page(evaluation, models, registration))
    link = page.resolve().as_uri()
    console.print(f"page: [link={link}]{link}[/link]", highlight=False, soft_wrap=True)
    if show:
        webbrowser.open(link)


def find_evaluation(name: str | None, catalog: CatalogProtocol, project: Path) -> Path:
    """The evaluation with a version, in a folder, or of a policy; without a name the newest one."""
    published = sorted(evaluations(catalog), key=lambda folder: folder.parent.name)
    chosen = [folder for folder in published if name in (None, folder.parent.name)]
    if chosen:
        return chosen[-1]
    if name is None:
        raise ArtifactError("found no published evaluation. Fix: `kedro run --pipeline=full`")
    folder = folder_of(name, catalog, project)
    if (folder / "evaluation.json").is_file():
        return folder
    artifacts = all_artifacts(catalog, Path(catalog.load("workspace")))
    policy = find(name, artifacts, catalog, project)
    if not policy.evaluations:
        raise ArtifactError(
            f"{name}: found no evaluation of it here, expected one. Fix: choose one that "
            "`kedro rlhf runs` lists"
        )
    of_policy = [evaluation for evaluation, _ in policy.evaluations]
    return [*of_policy[:1], *(each for each in published if each in of_policy)][-1]


def beside(evaluation: Path, kind: str, catalog: CatalogProtocol) -> Path | None:
    """Where the run that published an evaluation publishes its page or its registration."""
    if evaluation not in [folder.resolve() for folder in evaluations(catalog)]:
        return None
    prefix = evaluation.name.removesuffix("evaluation")
    name = {"page": f"{evaluation.name}_page", "registration": f"{prefix}registration"}[kind]
    dataset = catalog.get(name)
    versions = getattr(dataset, "folder", None) or Path(str(dataset._filepath))
    return versions / evaluation.parent.name / versions.name
