"""Writes the generated parts of the manual: parameters, commands, and the graph of the stages.

`make reference` calls it. A part stands between the lines `<!-- NAME: make reference -->` and
`<!-- end -->`, where NAME is one of `PARTS`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import graph
from pydantic_core import PydanticUndefined

from rlhf_pipeline.cli import cli
from rlhf_pipeline.commands.command import CONFIGURATION
from rlhf_pipeline.commands.params import Parameter, top_level
from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.rewards import RewardSource
from rlhf_pipeline.config.training import SavingConfig

DOCS = Path(__file__).parents[1]
PART = re.compile(r"(?<=<!-- )(\w+)(: make reference -->\n).*?(?=<!-- end -->)", re.DOTALL)
OWN, KINDS, SHARED = "", "Kinds of rewards and judges", "Shared blocks"
INHERITED: dict[type[Block], str] = {RewardSource: KINDS, SavingConfig: SHARED}
"""Classes without a place of their own that have a section, and where it stands."""
SKIPPED = {"--traceback", "--help", *(name for each in CONFIGURATION for name in each.opts)}
"""Options of many commands, which the page explains once."""


def filled(text: str) -> str:
    """The text of a page with its generated parts as the code has them now."""
    return PART.sub(lambda match: f"{match[1]}{match[2]}\n{PARTS[match[1]]()}\n\n", text)


class ParameterPage:
    """A section for each parameter block: first those that have one place, then the kinds of one
    parameter, then those that occur in several places."""

    def __init__(self) -> None:
        self.places: dict[type[Block], list[Parameter]] = {}
        for parameter in top_level():
            self.visit(parameter)
        self.groups: dict[type[Block], str] = {}
        for block, found in self.places.items():
            is_kind, is_top = len(found[0].blocks) > 1, "." not in found[0].place
            is_shared = len(found) > 1 and not is_top
            self.groups[block] = KINDS if is_kind else SHARED if is_shared else OWN
        for block, group in INHERITED.items():
            heirs = [found[0] for each, found in self.places.items() if issubclass(each, block)]
            self.places[block], self.groups[block] = heirs, group
        self.titles = {
            block: words(block) if group else f"`{self.places[block][0].place}`"
            for block, group in self.groups.items()
        }

    def visit(self, parameter: Parameter) -> None:
        """Note where blocks occur, and those inside them."""
        for block in parameter.blocks:
            self.places.setdefault(block, []).append(parameter)
            for inner in parameter.inside(block):
                self.visit(inner)

    def text(self) -> str:
        """The list of the top-level blocks, and all sections."""
        listed = [f"- [`{each.place}`](#{each.place}): {each.meaning}" for each in top_level()]
        texts = ["These are the blocks:", "\n".join(map(wrapped, listed))]
        for group in (OWN, KINDS, SHARED):
            texts += [f"## {group}"] if group else []
            for block in self.places:
                texts += self.section(block) if self.groups[block] == group else []
        return "\n\n".join(texts)

    def section(self, block: type[Block]) -> Iterator[str]:
        """The section of a block: its parameters, but for those that a related block has, too."""
        found = self.places[block]
        is_top = not self.groups[block] and "." not in found[0].place
        yield f"{'##' if is_top else '###'} {self.titles[block]}"
        yield linked(inspect.cleandoc(block.__doc__ or ""))
        if self.groups[block]:
            yield wrapped(f"In {', '.join(f'`{each.place}`' for each in found)}.")
        own = self.items(block)
        shared = {each: own.items() & self.items(each).items() for each in self.related(block)}
        base = max(shared, key=lambda each: len(shared[each]), default=None)
        same = dict(shared[base]) if base else {}
        if items := [text for name, text in own.items() if name not in same]:
            yield "\n".join(items)
        if same:
            names = ", ".join(f"`{name}`" for name in own if name in same)
            whose = f"{'Also those' if items else 'Those'} of {self.link(base, self.titles[base])}"
            yield wrapped(f"{whose}, with its defaults: {names}.")

    def items(self, block: type[Block]) -> dict[str, str]:
        """The parameters of a block as items of a list, by name."""
        found = self.places[block]
        has_place = self.groups[block] == OWN or (len(found) == 1 and block not in INHERITED)
        parameter = found[0] if has_place else found[0]._replace(default=None)
        return {each.place.rpartition(".")[2]: self.item(each) for each in parameter.inside(block)}

    def item(self, parameter: Parameter) -> str:
        """A parameter as an item of a list."""
        kind = parameter.values
        if parameter.blocks:
            kind = kind.replace("block", self.link(parameter.blocks[0], "block"))
        if parameter.default is PydanticUndefined:
            kind += ", required"
        return wrapped(f"- `{parameter}` ({kind}): {linked(parameter.meaning)}")

    def related(self, block: type[Block]) -> Iterator[type[Block]]:
        """The blocks to which the section of this one may refer: those that it extends, and of
        those before it with a place of their own also one that extends it."""
        blocks = list(self.places)
        for each in blocks:
            is_before = blocks.index(each) < blocks.index(block) or each in INHERITED
            is_extended = self.groups[block] == self.groups[each] == OWN and issubclass(each, block)
            if is_before and block is not each and (is_extended or issubclass(block, each)):
                yield each

    def link(self, block: type[Block], text: str) -> str:
        """A link to the section of a block, or to all kinds of the parameter."""
        is_kind = self.groups[block] == KINDS and block not in INHERITED
        heading = KINDS if is_kind else self.titles[block]
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        return f"[{text}](#{anchor})"


def parameters() -> str:
    """The list of the top-level blocks, and a section for each block."""
    return ParameterPage().text()


def words(block: type[Block]) -> str:
    """The name of a class in words: `Frozen DeepSpeed` of FrozenDeepSpeedConfig."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", block.__name__.removesuffix("Config"))
    text = text.replace("Deep Speed", "DeepSpeed").replace("Lo RA", "LoRA")
    return text[0] + re.sub(r"\b[A-Z](?=[a-z]+\b)", lambda m: m[0].lower(), text[1:])


def linked(text: str) -> str:
    """The text, in which the name of a page is a link."""
    return re.sub(r"docs/([\w-]+\.md)", r"[docs/\1](\1)", text)


def wrapped(text: str) -> str:
    """The text in lines of at most 100 characters, none of which begins like an item of a list."""
    for width in range(100, 80, -1):
        indent = "  " if text.startswith("- ") else ""
        lines = textwrap.wrap(
            text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        if not any(re.match(r" *([-+*#>|]|\d+[.)] )", line) for line in lines[1:]):
            return "\n".join(lines)
    raise ValueError(f"found no width for {text}")


def commands() -> str:
    """A section for each command."""
    rlhf = cli.commands["rlhf"]
    assert isinstance(rlhf, click.Group)
    context = click.Context(rlhf)
    each: dict[str, click.Command] = {"kedro run": cli.commands["run"]}
    for name in rlhf.list_commands(context):
        if command := rlhf.get_command(context, name):
            each[f"kedro rlhf {name}"] = command
    return "\n\n".join(text for name, command in each.items() for text in usage(name, command))


def usage(name: str, command: click.Command) -> Iterator[str]:
    """The usage, help and options of one command."""
    context = click.Context(command, info_name=name)
    pieces = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
    yield f"## `{name}`"
    yield f"`{' '.join([name, *pieces, '[OPTIONS]'])}`"
    yield inspect.cleandoc(command.help or "").replace("\b\n", "")
    items = []
    for each in command.get_params(context):
        record = each.get_help_record(context)
        if record and record[1] and (name == "kedro run" or SKIPPED.isdisjoint(each.opts)):
            option, meaning = (" ".join(part.split()) for part in record)
            meaning = meaning.replace("__", r"\_\_")  # else Markdown makes it bold
            items.append(wrapped(f"- `{option}`: {meaning}"))
    if name != "kedro run" and set(CONFIGURATION) <= set(command.params):
        names = ", ".join(f"`{each.opts[0]}`" for each in CONFIGURATION)
        items.append(f"- {names}: as for [`kedro run`](#kedro-run).")
    if items:
        yield "\n".join(items)


PARTS = {"graph": graph.mermaid, "parameters": parameters, "commands": commands}


def main() -> None:
    """Write the pages whose generated parts have changed."""
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        if (new := filled(text)) != text:
            page.write_text(new)
            print(f"{page.relative_to(DOCS.parent)} is written")


if __name__ == "__main__":
    main()
