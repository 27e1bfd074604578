"""`kedro rlhf report` and `kedro rlhf runs`: the published evaluations and their pages."""

import webbrowser

import click
from rich.console import Console

from rlhf_pipeline.commands.command import Command, plain_table, show_link
from rlhf_pipeline.config.evaluate import REWARD_MODEL
from rlhf_pipeline.errors import ArtifactError, as_typed
from rlhf_pipeline.kedro_run.artifacts import Ledger
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.runtime.manifest import Manifest, verify
from rlhf_pipeline.tracking.registration import read_registration
from rlhf_pipeline.verdict.comparison import read_evaluation
from rlhf_pipeline.verdict.page import evaluation_page, is_current
from rlhf_pipeline.verdict.words import metric_value


@click.command(cls=Command)
@click.argument("evaluation", required=False)
@click.option(
    "--open/--no-open",
    "show",
    default=True,
    help="Open the page in a browser, which is the default.",
)
def report(ledger: Ledger, console: Console, evaluation: str | None, show: bool) -> None:
    """Show the page of EVALUATION with its verdict, results, curves and answers.

    EVALUATION is a version that `kedro rlhf runs` lists, or the folder of an evaluation. The name
    of a policy (a version or an alias of the registered model, or a folder) selects the newest
    evaluation of that policy. The default is the newest of all evaluations. If the page does not
    exist yet, or it or the evaluation was changed, the command makes it.
    """
    folder = ledger.evaluation(evaluation).resolve()
    page = ledger.beside(folder, "page") or folder.with_name(f"{folder.name}.html")
    verify(folder)
    if not page.is_file() or not is_current(page.read_bytes().decode(errors="replace"), folder):
        models = [path for path, _ in ledger.ancestors(folder)]
        registered = ledger.beside(folder, "registration")
        is_here = registered and registered.is_file()
        registration = read_registration(registered) if registered and is_here else None
        page.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(page, evaluation_page(folder, models, registration))
    link = page.resolve().as_uri()
    show_link(console, "page", link)
    if show:
        webbrowser.open(link)


@click.command(cls=Command)
def runs(ledger: Ledger, console: Console) -> None:
    """List the published evaluations, the newest one last."""
    found = {Manifest.read(folder).fingerprint: folder for folder in ledger.evaluations}
    if not found:
        console.print(as_typed("No evaluation is published here. Fix: `kedro run --pipeline=full`"))
        return
    table = plain_table("version", "policy", "seed", "win rate against the baseline", "judge", "KL")
    faults = []
    for folder in sorted(found.values(), key=lambda folder: folder.parent.name):
        try:
            compared = read_evaluation(folder, earlier=True)
        except ArtifactError as error:
            faults.append(str(error))
            continue
        candidate, judge = compared["candidate"], compared["judge"]
        rate = compared["win_rates"][judge]
        table.add_row(
            folder.parent.name,
            candidate,
            str(Manifest.read(folder).seed),
            f"{rate['rate']:.1%} [{rate['lower']:.1%}, {rate['upper']:.1%}]",
            "reward model" if judge == REWARD_MODEL else judge,
            metric_value(compared["policies"][candidate], "kl", "z.2f").partition(" [")[0],
        )
    console.print(table)
    if faults:
        raise ArtifactError("\n".join(faults))
