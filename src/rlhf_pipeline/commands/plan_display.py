from rich.console import Console
from rich.table import Table

from rlhf_pipeline.commands.plan import Plan
from rlhf_pipeline.sizing.fit import Fit, size_text
from rlhf_pipeline.sizing.hardware import GIB
from rlhf_pipeline.sizing.work import LEAST_RATE_SUM, Work

COLUMNS = {
    "weights": "weights",
    "gradients": "gradi-\nents",
    "master copies": "master\ncopies",
    "optimizer": "opti-\nmizer",
    "activations": "activa-\ntions",
    "logits": "logits",
    "KV cache": "KV\ncache",
}
"""Heads of the components with a column, for 80 columns in all; the others are added up."""


def show(plan: Plan, console: Console) -> None:
    """Print the plan as tables."""
    hardware = plan.hardware
    nodes = f"{hardware.nodes} nodes of " if hardware.nodes > 1 else ""
    each = f", {size_text(hardware.rank_memory)} each" if hardware.rank_memory else ""
    kind = hardware.name if hardware.on_gpu else "CPU rank"
    console.print(
        f"[bold]{plan.model}[/]: {_count(plan.shape.parameters)} parameters, on "
        f"{nodes}{hardware.ranks} x {kind}{each}"
    )
    console.print("\n[bold]Memory of a rank at its peak, GiB")
    console.print(_memory_table(plan))
    console.print("\n[bold]Work of all ranks; disk and main memory of a node, GiB")
    console.print(_work_table(plan))
    source = "the published split" if plan.is_measured else "the limits of split, as upper bounds"
    console.print(f"[dim]Rows and lengths: {source}.\n")
    for stage, fit in plan.fits.items():
        console.print(verdict(stage, fit), highlight=False)
    if "ppo" in plan.works and plan.works["ppo"].cannot_move:
        console.print(movement_warning(plan.works["ppo"]), highlight=False)


def _memory_table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("stage, model", no_wrap=True)
    for name in (*COLUMNS.values(), "other", "all"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage, fit in plan.fits.items():
        memory = fit.memory
        color = "green" if fit.fits else "red"
        at = f" [dim]({memory.largest.name})" if memory.largest.model != stage else ""
        table.add_row(
            f"[bold]{stage}[/]{at}", *[""] * len(COLUMNS), "", f"[bold {color}]{_gib(memory.peak)}"
        )
        for model in memory.models:
            parts = memory.parts_of(model)
            shown = [parts.pop(name, 0) for name in COLUMNS]
            other = sum(parts.values())
            cells = [_gib(value) if value else "" for value in (*shown, other)]
            name = model.name.removeprefix(f"{stage}.")
            table.add_row(f"  {name}", *cells, _gib(sum(shown) + other))
        table.add_row(
            "  [dim]libraries", *[""] * len(COLUMNS), "", f"[dim]{_gib(memory.libraries)}"
        )
    return table


def _work_table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("stage", no_wrap=True)
    counts = ("batch", "a\nrank", "passes", "steps", "tokens", "FLOP")
    sizes = ("check-\npoints", "models", "main\nmemory")
    for name in (*counts, *sizes):
        table.add_column(name, justify="right", no_wrap=True)
    for stage, work in plan.works.items():
        main = plan.fits[stage].memory.main_of_node(plan.hardware.ranks)
        table.add_row(
            f"[bold]{stage}",
            *map(str, (work.batch, work.rows_per_rank, work.micro_batches)),
            "" if stage == "evaluate" else _count(work.steps),
            _count(work.tokens),
            "?" if work.flops is None else f"{work.flops:.1e}".replace("e+", "e"),
            *map(_gib, (work.checkpoints, work.saved_models, main)),
        )
    return table


def verdict(stage: str, fit: Fit) -> str:
    """Whether a stage fits, and the change that makes it fit."""
    need = fit.before
    if need.available is None:
        return f"{stage}: needs {size_text(need.found)}; the memory of this machine is not known"
    if fit.fits:
        return f"[green]{stage} fits[/]: {size_text(need.found)} of {size_text(need.available)}"
    text = f"[red]{stage} does not fit[/]: {need}. "
    after = f"{size_text(fit.after.found)}{need.kind}"
    if fit.changes is None:
        return f"{text}No change of its parameters is enough ({after} at least). Fix: {fit.fix}"
    return f"{text}Fix: {fit.fix} ({after})"


def movement_warning(work: Work) -> str:
    """What PPO's learning rate and number of updates are too small for."""
    return (
        f"[yellow]ppo hardly trains[/]: the learning rates of its {work.updates} updates sum to "
        f"{work.rate_sum:.1e}, expected at least {LEAST_RATE_SUM:.0e}. Fix: raise ppo.steps, "
        "ppo.ppo_epochs or ppo.actor.optimizer.learning_rate"
    )


def _count(value: float | None) -> str:
    """Such as 950, 1.2 M or 3.4 B; ? if it is not known."""
    if value is None:
        return "?"
    if value < 10_000:
        return f"{value:.0f}"
    unit, name = next(each for each in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if each[0] <= value)
    return f"{value / unit:.3g} {name}"


def _gib(value: float) -> str:
    return f"{value / GIB:.2f}" if value < 100 * GIB else f"{value / GIB:.0f}"
